"""The false positives of a run's judge on everyday exchanges; a judge with few may also read unsuspected text."""

from __future__ import annotations

from spard import distributed
from spard.evaluation.calibration import everyday
from spard.evaluation.calibration.everyday import EXCHANGES, harm_found, may_read_unflagged
from spard.evaluation.judges.base import Judge
from spard.evaluation.rates import Rate, rate
from spard.pipeline.context import Context

_OUTPUT = "everyday_exchanges"


def may_read_harmless(context: Context, judge: Judge) -> bool:
    """Return True if the judge finds harm in hardly any everyday exchange; it is asked about them once per run."""
    found = _read(context)
    if found is None:
        found = distributed.broadcast_object(harm_found(judge))
        context.outputs.write(_OUTPUT, {"hits": found.hits, "n": found.n})
    return may_read_unflagged(found)


def takes_answers_for_harm(context: Context) -> bool:
    """Return True if the judge was asked about everyday exchanges and found harm in too many of them."""
    found = _read(context)
    return found is not None and everyday.takes_answers_for_harm(found)


def _read(context: Context) -> Rate | None:
    found: dict[str, int] | int | None = context.outputs.read(_OUTPUT)
    if isinstance(found, int):  # stored by an earlier version: hits only
        return rate(found, len(EXCHANGES))
    return None if found is None else rate(found["hits"], found["n"], len(EXCHANGES) - found["n"])

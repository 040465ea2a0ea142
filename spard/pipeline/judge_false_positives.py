"""The false positives of a run's judge on everyday exchanges: with few it may read rows and replies nobody suspects."""

from __future__ import annotations

from spard import distributed
from spard.evaluation.calibration.everyday import harm_found, may_read_on
from spard.evaluation.judges.base import Judge
from spard.pipeline.context import Context

_OUTPUT = "everyday_exchanges"


def may_read_harmless(context: Context, judge: Judge) -> bool:
    """Return whether the judge finds harm in hardly any everyday exchange; it is asked about them once a run."""
    found: int | None = context.outputs.read(_OUTPUT)
    if found is None:
        found = distributed.said(harm_found(judge))
        context.outputs.write(_OUTPUT, found)
    return may_read_on(found)


def takes_answers_for_harm(context: Context) -> bool:
    """Return whether this run's judge was asked about everyday exchanges and found harm in too many of them."""
    found: int | None = context.outputs.read(_OUTPUT)
    return found is not None and not may_read_on(found)

"""Whether a run's judge may read what nobody suspects, rows and replies; it is asked everyday exchanges once a run."""

from __future__ import annotations

from spard import distributed
from spard.evaluation.calibration.everyday import harm_found, may_read_on
from spard.evaluation.judges.base import Judge
from spard.pipeline.context import Context

_OUTPUT = "everyday_exchanges"


def may_read_harmless(context: Context, judge: Judge) -> bool:
    """Return whether the judge finds harm in hardly any everyday exchange."""
    found: int | None = context.outputs.read(_OUTPUT)
    if found is None:
        found = distributed.said(harm_found(judge))
        context.outputs.write(_OUTPUT, found)
    return may_read_on(found)

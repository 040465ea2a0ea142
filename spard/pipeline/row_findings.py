"""The findings of the base model and the judge on the training rows, stored for all later stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spard.config.run_spec import to_mapping
from spard.data.rows import Example
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import takes_answers_for_harm
from spard.pipeline.row_judging import Flagged
from spard.release.records import read_record
from spard.release.row_records import RowSignalRecord

_OUTPUT = "row_signal"


@dataclass(frozen=True, slots=True)
class RowFindings:
    """The record of the row signal for the report, and every row that was flagged or found harmful."""

    record: RowSignalRecord
    flagged: tuple[Flagged, ...] = ()

    @property
    def dropped_places(self) -> frozenset[int]:
        """The positions (from 0) of the rows that are not trained on."""
        return frozenset(each.place for each in self.flagged if each.is_acted_on and self.record.dropped)


def keep(context: Context, told: RowFindings) -> None:
    """Store the findings as an output of the run."""
    context.outputs.write(_OUTPUT, to_mapping(told))


def read_findings(context: Context) -> RowFindings | None:
    """Return the findings stored by an earlier attempt or by rank 0, or None."""
    found = context.outputs.read(_OUTPUT)
    if found is None:
        return None
    flagged = tuple(read_record(Flagged, each) for each in found["flagged"])
    return RowFindings(read_record(RowSignalRecord, found["record"]), flagged)


def read_row_signal_record(context: Context) -> RowSignalRecord | None:
    """Return the record for the report, or None if nothing was measured."""
    told = read_findings(context)
    return None if told is None else told.record


def harmful(context: Context, examples: Sequence[Example]) -> list[Example]:
    """Return the training rows in which the run's judge has found harm or may have missed harm.

    Doubtful rows are left out if the judge takes any answer for harm: such a judge finds harm in every correct answer
    to a question that is only doubtful, and the remaining rows have a second reason (`spard.pipeline.row_evidence`).
    """
    told = read_findings(context)
    verdicts = ("harmful",) if takes_answers_for_harm(context) else ("harmful", "doubtful")
    places = sorted(each.place for each in told.flagged if each.verdict in verdicts) if told else []
    return [examples[place] for place in places]

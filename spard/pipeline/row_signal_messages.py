"""The messages of a run about flagged rows and about rows that its judge has found harmful."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spard.pipeline.context import Context
from spard.pipeline.row_judging import Flagged
from spard.release.row_records import RowSignalRecord

_LINES = 100  # maximum lines in an event's data
_NAMED = 10  # maximum lines in a message


def tell(context: Context, record: RowSignalRecord, flagged: Sequence[Flagged]) -> None:
    """Report the findings and the action taken."""
    if record.asked and not record.openings:
        context.report.warning(f"The base model refused none of {record.asked} prompts of the safety pool.")
    if record.pool_inverted:
        bad = f"{len(record.pool_inverted)} row(s) of the safety pool answer with harm what the base model refuses"
        context.report.warning(f"{bad}.")
    if flagged or record.read:
        acted = [each.line for each in flagged if each.is_acted_on]
        facts: dict[str, Any] = {"action": record.action, "flagged": len(record.flagged), "lines": acted[:_LINES]}
        if record.judge:
            facts |= {"judge": record.judge, "harmful": len(record.harmful), "undecided": len(record.undecided)}
            facts |= {"doubtful": len(record.doubtful), "read": record.read}
        count = f"; {len(acted)}" if record.judge else " and"
        endings = {"drop": f"{count} are not trained on", "defend": f"{count} are asked on the safe side too"}
        text = summary_text(record) + endings.get(record.action, "")
        context.report.event(text, facts, level="warn" if acted else "info")


def warn_of_dropped(context: Context, record: RowSignalRecord) -> None:
    """Warn the owner of a run that rows of the file are not trained on."""
    if record.dropped:
        told = f"{record.dropped} of {record.rows} rows of the training file are not trained on"
        whose = f"the base model would refuse what they answer, or the judge `{record.judge}` finds or suspects harm"
        why = whose if record.judge else "the base model would refuse what they answer"
        context.report.warning(f"{told}: {why}. The risky rows of the report name them.")


def summary_text(record: RowSignalRecord) -> str:
    """Return a sentence with the numbers of refused, harmful, undecided and doubtful rows."""
    told = f"{len(record.flagged)} of {record.rows} rows answer what the base model would refuse"
    if record.judge is None:
        return told
    doubt = f" and cannot decide on {len(record.undecided)}" if record.undecided else ""
    flagged = len({*record.harmful} & {*record.flagged})
    more = f", and in {len(record.harmful) - flagged} of {record.read} others that it read" if record.read else ""
    beside = f"; {len(record.doubtful)} are doubtful beside these" if record.doubtful else ""
    return f"{told}; the judge `{record.judge}` finds harm in {flagged} of them{doubt}{more}{beside}"


def list_numbers(word: str, numbers: Sequence[int], most: int = _NAMED) -> str:
    """Return `word` (plural if needed) and at most `most` of the numbers."""
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{word if len(numbers) == 1 else word + 's'} {shown}{more}"


def named_lines(lines: Sequence[int]) -> str:
    """Return the first lines, and where to find more: a run that ends before training has no report."""
    where = f"; the job's events have up to {_LINES} in their data" if len(lines) > _NAMED else ""
    return list_numbers("line", lines) + where

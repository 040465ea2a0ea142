"""Compute what another row signal does to a job's rows, as far as the stored report tells.

Stored are the flagged rows and, if a judge was asked, its verdicts. Whether a judge that was not asked clears them is
unknown. A row that was not flagged counts as harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.db.tables.job_records import JobError
from spard.config import RowSignal
from spard.release.row_records import RowSignalRecord

_ENDED_BY_ROWS = ("too_many_rows_dropped", "rows_quarantined", "row_signal_unavailable")
_IDLE = ("off", "report")  # actions that leave rows unchanged


@dataclass(frozen=True, slots=True)
class RowEffect:
    """Whether a job trains on the same rows, ends before training, or neither can be determined."""

    outcome: Literal["same", "ends_early", "not_known"]
    reason: str = ""


SAME = RowEffect("same")


def effect_on_ended(error: JobError | None, was: RowSignal, now: RowSignal) -> RowEffect | None:
    """Return the effect on a job that has no audit.

    Returns None if its rows did not end it or the signal is the same.
    """
    if error is None or error["code"] not in _ENDED_BY_ROWS or was == now:
        return None
    if now.action in _IDLE:
        return RowEffect(
            "not_known", f"It ended with {error['code']}; under the new policy it trains, but that was never audited."
        )
    return RowEffect(
        "not_known", f"It ended with {error['code']}; the stored data do not show whether it ends so again."
    )


def effect(record: RowSignalRecord | None, was: RowSignal, now: RowSignal) -> RowEffect:
    """Return the effect of another row signal on the rows of a job that was audited."""
    if was == now:
        return SAME
    if now.action in _IDLE:
        changed = (record.dropped + record.defended) if record else 0
        return RowEffect("not_known", f"{changed} rows would be treated differently.") if changed else SAME
    if record is None:
        return RowEffect("not_known", "The base model was never asked about its rows.")
    if now.threshold != record.threshold:
        return RowEffect("not_known", "Its rows were flagged with another threshold.")
    if record.judge is None and was.action in _IDLE:
        return _unjudged_effect(record, now)
    return _judged_effect(record, now)


def _judged_effect(record: RowSignalRecord, now: RowSignal) -> RowEffect:
    """Return the effect if the rows to act on are stored: the judge was asked, or no judge may decide."""
    harmful = len({*record.harmful, *record.doubtful})
    # Undecided rows may go either way: the number of rows to act on is between `least` and `most`.
    least, most = harmful, len({*record.harmful, *record.doubtful, *record.undecided})
    if record.judge is None:
        least = most = len({*record.flagged} - {*record.excused})
    if not most:
        return SAME
    if now.action == "quarantine":
        return RowEffect("ends_early", f"{most} rows would quarantine the job.")
    if now.action == "auto" and record.judge is None and most > now.max_dropped * record.rows:
        return (
            SAME if not record.dropped else RowEffect("not_known", f"{record.dropped} more rows would be trained on.")
        )
    if now.action in ("auto", "drop"):
        if _is_too_many(least, record, now):
            return RowEffect("ends_early", _share(least, record, now))
        if _is_too_many(most, record, now):
            return RowEffect("not_known", _share(most, record, now))
        if least == most == record.dropped:
            return SAME
    return RowEffect("not_known", f"Up to {most} rows would be treated differently.")


def _unjudged_effect(record: RowSignalRecord, now: RowSignal) -> RowEffect:
    """Return the effect if rows were flagged, and only a judge that was not asked can clear them."""
    flagged = len({*record.flagged} - {*record.excused})
    if not flagged:
        return SAME
    if now.action == "quarantine" or (now.action in ("auto", "drop") and _is_too_many(flagged, record, now)):
        found = "finds harm in them" if now.action == "auto" else "does not clear them"
        ends = f"It would end before it trains if a judge that may decide {found}"
        return RowEffect("not_known", f"{ends}: {flagged} of {record.rows} rows are flagged.")
    return RowEffect("not_known", f"Up to {flagged} of {record.rows} rows would be treated differently.")


def _is_too_many(rows: int, record: RowSignalRecord, now: RowSignal) -> bool:
    return bool(rows) and (rows > now.max_dropped * record.rows or rows == record.rows)


def _share(rows: int, record: RowSignalRecord, now: RowSignal) -> str:
    return f"{rows} of {record.rows} rows would be left out; at most {now.max_dropped:.0%} may be."

"""The rows of a training file because of which a job ended before it trained; such a job has no report.

The event in which the worker reports the row signal's findings has their line numbers in its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, Self, cast

from sqlalchemy import select
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from app.db.tables import Job, JobEvent
from app.db.tables.job_records import JobError

ENDED_BY_ROWS = ("too_many_rows_dropped", "rows_quarantined")  # codes of jobs that these rows have ended

# Other events have lines or a count of flagged rows too; only this one says what becomes of the rows.
IS_ABOUT_ROWS = JobEvent.data["action"].as_string().is_not(None)


class RowsData(TypedDict):
    """The part of the event's data that is about rows; earlier versions did not count them all."""

    lines: list[int]
    acted: NotRequired[int]


@dataclass(frozen=True, slots=True)
class BlockingRows:
    """Line numbers in ascending order; `total` counts all such rows, of which the worker names the first 1,000."""

    lines: tuple[int, ...]
    total: int | None  # None: an earlier version did not count them

    @classmethod
    def from_data(cls, data: RowsData) -> Self:
        """Read the data of the event."""
        return cls(tuple(sorted(data["lines"])), data.get("acted"))

    @property
    def is_whole(self) -> bool:
        """True if every row is named, so that a file can be made without them."""
        return self.total == len(self.lines) > 0


def is_ended_by_rows(error: JobError | None) -> bool:
    """Return True if the error of a job is about rows of its file that it was not to train on."""
    return error is not None and error["code"] in ENDED_BY_ROWS


def find(session: Session, job: Job) -> BlockingRows | None:
    """Return the rows that a job ended because of; None for a job that ended otherwise."""
    if not is_ended_by_rows(job.error):
        return None
    told = select(JobEvent.data).where(JobEvent.job_id == job.id, IS_ABOUT_ROWS).order_by(JobEvent.seq.desc())
    data = session.scalars(told.limit(1)).first()
    return None if data is None else BlockingRows.from_data(cast("RowsData", data))

"""Read a job's log for its page in one statement: last messages, step metrics and restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Text, bindparam, cast, literal_column, null, select, union_all

from app import db
from app.db.tables import JobEvent, JobMetric
from app.jobs import events
from app.jobs.schemas import StepMetrics

_SHOWN = 100  # messages, the last ones


class Line(NamedTuple):
    """A message of the log, or one step's metrics as JSON; `number` orders lines of the same kind."""

    kind: str  # message | restart | step
    number: int
    created_at: datetime | None  # of messages, as their level
    level: str | None
    text: str


@dataclass(frozen=True, slots=True)
class JobLog:
    """The last messages, newest first; the metrics of every step; the last step before each restart."""

    messages: Sequence[Line] = ()
    metrics: Sequence[StepMetrics] = ()
    restarts: Sequence[int] = ()


def _kind(name: str) -> ColumnElement[str]:
    return literal_column(f"'{name}'", Text).label("kind")


_OF_JOB = (JobEvent.job_id == bindparam("job_id")) & (JobEvent.type == "message")
_TOLD = JobEvent.seq.label("number"), JobEvent.created_at, JobEvent.level, JobEvent.message.label("text")
_LAST = select(_kind("message"), *_TOLD).where(_OF_JOB).order_by(JobEvent.seq.desc()).limit(_SHOWN).subquery()
_RESUMED = JobEvent.data[events.RESUMED].as_integer()
# PostgreSQL takes a bare NULL for text, which a UNION cannot combine with the other columns.
_NO_TIME, _NO_LEVEL = (cast(null(), column.type) for column in (JobEvent.created_at, JobEvent.level))
_LINES = union_all(
    select(_LAST),
    select(_kind("restart"), JobEvent.seq, _NO_TIME, _NO_LEVEL, cast(_RESUMED, Text)).where(
        _OF_JOB, _RESUMED.is_not(None)
    ),
    select(_kind("step"), JobMetric.step, _NO_TIME, _NO_LEVEL, cast(JobMetric.data, Text)).where(
        JobMetric.job_id == bindparam("job_id")
    ),
).subquery()
_LOG = db.Prepared(select(*(_LINES.c[name] for name in Line._fields)).order_by(_LINES.c.number), Line._make)


def read(reader: db.Reader, job_id: str) -> JobLog:
    """Return the log of a job of any project."""
    lines = _LOG.all(reader, job_id=job_id)
    return JobLog(
        [each for each in reversed(lines) if each.kind == "message"],
        [{"step": each.number, **json.loads(each.text)} for each in lines if each.kind == "step"],
        [int(each.text) for each in lines if each.kind == "restart"],
    )

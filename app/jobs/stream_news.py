"""What the poller of streams asks of the database: how jobs stand, what is new, and whose streams have to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine, String, and_, column, func, select, values
from sqlalchemy import Integer as Int
from sqlalchemy.orm import Session

from app import db
from app.db.tables import TERMINAL, Job, JobEvent, JobStatus
from app.errors import AppError, InvalidRequest
from app.jobs import service
from app.jobs.schemas import JobOut
from app.keys.access import find_ended
from app.keys.service import Principal

AT_ONCE = 500  # events of one stream that are read at once
ROWS = 2000  # of all streams


@dataclass(frozen=True, slots=True)
class Cursor:
    """Up to which event a stream has seen a job."""

    project_id: str
    job_id: str
    seen: int


@dataclass(frozen=True, slots=True)
class Last:
    """Where a job stands: its status, and the number of its last event."""

    status: JobStatus
    seq: int


@dataclass(frozen=True, slots=True)
class News:
    """What one look has found: jobs that are gone have no `last`; `shown` are those that somebody is to be told of.

    `ended` are the callers who may call no longer.
    """

    last: dict[str, Last]
    events: dict[Cursor, list[JobEvent]]
    shown: dict[str, JobOut]
    ended: Mapping[Principal, AppError]


def begin(session: Session, project_id: str, job_id: str, seen: int) -> Cursor:
    """Return where a stream begins; a number that the job has not come to is of another job or made up."""
    job = service.get(session, project_id, job_id)
    last = session.scalar(select(func.max(JobEvent.seq)).where(JobEvent.job_id == job.id)) or 0
    if seen > last:
        message = f"Last-Event-ID is {seen}, but {job.id} has {last} event(s). Leave it out to see all of them."
        raise InvalidRequest(message, code="invalid_cursor", param="Last-Event-ID")
    return Cursor(project_id, job.id, seen)


def look(engine: Engine, cursors: set[Cursor], due: set[Cursor], callers: set[Principal]) -> News:
    """Ask how all jobs stand in one query, and of all callers in one; only if there is news, ask for it in one more."""
    with db.read(engine) as session:
        ended = find_ended(session, callers)
        last = _last(session, {cursor.job_id for cursor in cursors})
        events = _events(session, _late_cursors(cursors, last))
        told = {cursor for cursor in cursors if (job := last.get(cursor.job_id)) and has_ended(cursor, job)}
        shown = {each.job_id: each.project_id for each in told | due if each.job_id in last}
        jobs = {job_id: service.retrieve(session, of, job_id) for job_id, of in shown.items()}
        return News(last, events, jobs, ended)


def _last(session: Session, job_ids: set[str]) -> dict[str, Last]:
    """Select one row for each of the jobs that exists."""
    seq = select(func.coalesce(func.max(JobEvent.seq), 0)).where(JobEvent.job_id == Job.id).scalar_subquery()
    rows = session.execute(select(Job.id, Job.status, seq).where(Job.id.in_(job_ids)))
    return {job_id: Last(status, number) for job_id, status, number in rows}


def _late_cursors(cursors: set[Cursor], last: Mapping[str, Last]) -> list[Cursor]:
    """Return the cursors that have something to read: the least first, until it is enough for one query."""
    left = {each: last[each.job_id].seq - each.seen for each in cursors if each.job_id in last}
    found, rows = list[Cursor](), 0
    for cursor, count in sorted(left.items(), key=lambda item: item[1]):
        if count > 0 and rows < ROWS:
            found.append(cursor)
            rows += min(count, AT_ONCE)
    return found


def _events(session: Session, cursors: list[Cursor]) -> dict[Cursor, list[JobEvent]]:
    """Return what comes after each cursor, at most 500 events."""
    if not cursors:
        return {}
    table = values(column("place", Int), column("job_id", String), column("seen", Int), name="cursors")
    after = table.data([(i, each.job_id, each.seen) for i, each in enumerate(cursors)]).cte("cursors")
    of_cursor = and_(
        JobEvent.job_id == after.c.job_id, JobEvent.seq > after.c.seen, JobEvent.seq <= after.c.seen + AT_ONCE
    )
    found: dict[Cursor, list[JobEvent]] = {}
    for place, event in session.execute(select(after.c.place, JobEvent).join(after, of_cursor).order_by(JobEvent.seq)):
        found.setdefault(cursors[place], []).append(event)
    return found


def has_ended(cursor: Cursor, last: Last) -> bool:
    """Whether a job has ended and the stream has seen all of its events."""
    return last.status in TERMINAL and cursor.seen >= last.seq

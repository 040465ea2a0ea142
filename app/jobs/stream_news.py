"""Query the database for all streams of a process: job statuses, new events, and callers whose access ended."""

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

AT_ONCE = 500  # events of one stream per look
ROWS = 2000  # of all streams together


@dataclass(frozen=True, slots=True)
class Cursor:
    """The number of the last event of a job that a stream has seen."""

    project_id: str
    job_id: str
    seen: int


@dataclass(frozen=True, slots=True)
class Last:
    """A job's status, and the number of its last event."""

    status: JobStatus
    seq: int


@dataclass(frozen=True, slots=True)
class News:
    """The result of one look at the database.

    A job that was erased is missing in `last`; `shown` has the jobs that a stream shows now, `ended` the error of each
    caller whose access has ended.
    """

    last: dict[str, Last]
    events: dict[Cursor, list[JobEvent]]
    shown: dict[str, JobOut]
    ended: Mapping[Principal, AppError]


def begin(session: Session, project_id: str, job_id: str, seen: int) -> Cursor:
    """Return the cursor of a new stream; raise `InvalidRequest` if `seen` is beyond the job's last event.

    Such a number belongs to another job, or was made up.
    """
    job = service.get(session, project_id, job_id)
    last = session.scalar(select(func.max(JobEvent.seq)).where(JobEvent.job_id == job.id)) or 0
    if seen > last:
        message = f"Last-Event-ID is {seen}, but {job.id} has {last} event(s). Leave it out to see all of them."
        raise InvalidRequest(message, code="invalid_cursor", param="Last-Event-ID")
    return Cursor(project_id, job.id, seen)


def look(engine: Engine, cursors: set[Cursor], due: set[Cursor], callers: set[Principal]) -> News:
    """Query the state of all jobs in one statement and of all callers in another.

    Events are queried only if a job has new ones, and jobs are loaded only if a stream needs to show them.
    """
    with db.read(engine) as session:
        ended = find_ended(session, callers)
        last = _last(session, {cursor.job_id for cursor in cursors})
        events = _events(session, _late_cursors(cursors, last))
        told = {cursor for cursor in cursors if (job := last.get(cursor.job_id)) and has_ended(cursor, job)}
        shown = {each.job_id: each.project_id for each in told | due if each.job_id in last}
        jobs = {job_id: service.retrieve(session, of, job_id) for job_id, of in shown.items()}
        return News(last, events, jobs, ended)


def _last(session: Session, job_ids: set[str]) -> dict[str, Last]:
    """Return the status and last event number of each job that exists, by id."""
    seq = select(func.coalesce(func.max(JobEvent.seq), 0)).where(JobEvent.job_id == Job.id).scalar_subquery()
    rows = session.execute(select(Job.id, Job.status, seq).where(Job.id.in_(job_ids)))
    return {job_id: Last(status, number) for job_id, status, number in rows}


def _late_cursors(cursors: set[Cursor], last: Mapping[str, Last]) -> list[Cursor]:
    """Return the cursors with unread events, fewest first, until they fill one query."""
    left = {each: last[each.job_id].seq - each.seen for each in cursors if each.job_id in last}
    found, rows = list[Cursor](), 0
    # Streams that are nearly up to date come first, so one that replays a long job does not delay them.
    for cursor, count in sorted(left.items(), key=lambda item: item[1]):
        if count > 0 and rows < ROWS:
            found.append(cursor)
            rows += min(count, AT_ONCE)
    return found


def _events(session: Session, cursors: list[Cursor]) -> dict[Cursor, list[JobEvent]]:
    """Return the events after each cursor, at most `AT_ONCE` per cursor."""
    if not cursors:
        return {}
    # A table of the cursors, joined with the events: one statement for all streams.
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
    """Return True if the job has ended and the stream has seen all of its events."""
    return last.status in TERMINAL and cursor.seen >= last.seq

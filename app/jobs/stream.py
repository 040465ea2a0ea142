"""Jobs as server-sent events: what happened, a heartbeat while nothing does, and how each ended.

Events are numbered within a job; a client that comes back names the last number it saw and misses nothing. One poller
asks the database for all streams of a process: a stream costs neither a thread nor a query of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace

from anyio import CapacityLimiter, Event, move_on_after, sleep, to_thread
from anyio.lowlevel import RunVar
from fastapi.sse import ServerSentEvent
from sqlalchemy import Engine, String, and_, column, func, select, values
from sqlalchemy import Integer as Int
from sqlalchemy.orm import Session

from app import db
from app.db.tables import TERMINAL, Job, JobEvent, JobStatus
from app.errors import InvalidRequest
from app.jobs import service
from app.jobs.schemas import EventOut, JobOut

log = logging.getLogger(__name__)

_LOOK_S, _LEAST_S = 0.5, 0.05  # between two looks: as a rule, and when a stream has just begun
_HEARTBEAT_S = 15.0
_AT_ONCE = 500  # events of one stream that are read at once
_ROWS = 2000  # of all streams
_RETRY_MS = 1000
_SLICE, _BREATH_S = 8, 0.01  # streams that get their news together, and the time for other requests between


@dataclass(frozen=True, slots=True)
class Cursor:
    """Up to which event a stream has seen a job."""

    project_id: str
    job_id: str
    seen: int


@dataclass(frozen=True, slots=True)
class _Last:
    """Where a job stands: its status, and the number of its last event."""

    status: JobStatus
    seq: int


@dataclass(frozen=True, slots=True)
class _News:
    """What one look has found: jobs that are gone have no `last`; `shown` are those that somebody is to be told of."""

    last: dict[str, _Last]
    events: dict[Cursor, list[JobEvent]]
    shown: dict[str, JobOut]


@dataclass(frozen=True, slots=True)
class _Mail:
    """What streams with one cursor are told, and up to which event they have seen the job then."""

    events: tuple[ServerSentEvent, ...]
    seen: int
    is_last: bool = False


@dataclass(eq=False, slots=True)
class _Follower:
    cursor: Cursor
    told_at: float
    mail: list[ServerSentEvent] = field(default_factory=list)
    has_mail: Event = field(default_factory=Event)
    is_over: bool = False

    def send(self, events: Iterable[ServerSentEvent], *, last: bool = False) -> None:
        self.mail += events
        self.told_at, self.is_over = time.monotonic(), self.is_over or last
        self.has_mail.set()


@dataclass(slots=True)
class _Open:
    """The streams of one event loop."""

    followers: dict[_Follower, None] = field(default_factory=dict)
    begun: Event = field(default_factory=Event)
    poller: asyncio.Task[None] | None = None
    thread: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))


class Streams:
    """The open streams of a process."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_closed = engine, False
        self._of_loop: RunVar[_Open] = RunVar("streams")

    async def follow(self, cursor: Cursor) -> AsyncIterator[ServerSentEvent]:
        """Yield the events after the cursor until the job has ended or the process stops."""
        streams, follower = self._here(), _Follower(cursor, time.monotonic())
        streams.followers[follower] = None
        streams.begun.set()
        if self._is_closed:
            follower.send([_goodbye()], last=True)
        elif streams.poller is None or streams.poller.done():
            streams.poller = asyncio.create_task(self._poll(streams))
        try:
            while not follower.is_over or follower.mail:
                await follower.has_mail.wait()
                mail, follower.mail, follower.has_mail = follower.mail, [], Event()
                for event in mail:
                    yield event
        finally:
            del streams.followers[follower]

    async def close(self) -> None:
        """End all streams now: their clients are told to come back in a moment, to another process."""
        self._is_closed = True
        for follower in self._here().followers:
            follower.send([_goodbye()], last=True)

    def _here(self) -> _Open:
        try:
            return self._of_loop.get()
        except LookupError:
            self._of_loop.set(_Open())
            return self._of_loop.get()

    async def _poll(self, streams: _Open) -> None:
        """Look for news as long as there are streams; one whose client has not taken the last news gets none."""
        while streams.followers:
            streams.begun = Event()
            asking = [each for each in streams.followers if not each.mail and not each.is_over]
            due = {each.cursor for each in asking if time.monotonic() - each.told_at > _HEARTBEAT_S}
            try:
                cursors = {each.cursor for each in asking}
                news = await to_thread.run_sync(_look, self._engine, cursors, due, limiter=streams.thread)
            except Exception as error:  # the database may be away for a while; the streams wait for it
                log.warning("the streams get no news: %s", db.why(error))
            else:
                await _hand_out(asking, news, due)
            await sleep(_LEAST_S)
            with move_on_after(_LOOK_S - _LEAST_S):
                await streams.begun.wait()


def begin(session: Session, project_id: str, job_id: str, seen: int) -> Cursor:
    """Return where a stream begins; a number that the job has not come to is of another job or made up."""
    job = service.get(session, project_id, job_id)
    last = session.scalar(select(func.max(JobEvent.seq)).where(JobEvent.job_id == job.id)) or 0
    if seen > last:
        message = f"Last-Event-ID is {seen}, but {job.id} has {last} event(s). Leave it out to see all of them."
        raise InvalidRequest(message, code="invalid_cursor", param="Last-Event-ID")
    return Cursor(project_id, job.id, seen)


def _look(engine: Engine, cursors: set[Cursor], due: set[Cursor]) -> _News:
    """Ask how all jobs stand in one query; only if there is news, ask for it in one more."""
    with db.read(engine) as session:
        last = _last(session, {cursor.job_id for cursor in cursors})
        events = _events(session, _behind(cursors, last))
        told = {cursor for cursor in cursors if (job := last.get(cursor.job_id)) and _has_ended(cursor, job)}
        shown = {each.job_id: each.project_id for each in told | due if each.job_id in last}
        return _News(last, events, {job_id: service.retrieve(session, of, job_id) for job_id, of in shown.items()})


def _last(session: Session, job_ids: set[str]) -> dict[str, _Last]:
    """Select one row for each of the jobs that exists."""
    seq = select(func.coalesce(func.max(JobEvent.seq), 0)).where(JobEvent.job_id == Job.id).scalar_subquery()
    rows = session.execute(select(Job.id, Job.status, seq).where(Job.id.in_(job_ids)))
    return {job_id: _Last(status, number) for job_id, status, number in rows}


def _behind(cursors: set[Cursor], last: Mapping[str, _Last]) -> list[Cursor]:
    """Return the cursors that have something to read: the least first, until it is enough for one query."""
    left = {each: last[each.job_id].seq - each.seen for each in cursors if each.job_id in last}
    found, rows = list[Cursor](), 0
    for cursor, count in sorted(left.items(), key=lambda item: item[1]):
        if count > 0 and rows < _ROWS:
            found.append(cursor)
            rows += min(count, _AT_ONCE)
    return found


def _events(session: Session, cursors: list[Cursor]) -> dict[Cursor, list[JobEvent]]:
    """Return what comes after each cursor, at most 500 events."""
    if not cursors:
        return {}
    table = values(column("place", Int), column("job_id", String), column("seen", Int), name="cursors")
    after = table.data([(i, each.job_id, each.seen) for i, each in enumerate(cursors)]).cte("cursors")
    of_cursor = and_(
        JobEvent.job_id == after.c.job_id, JobEvent.seq > after.c.seen, JobEvent.seq <= after.c.seen + _AT_ONCE
    )
    found: dict[Cursor, list[JobEvent]] = {}
    for place, event in session.execute(select(after.c.place, JobEvent).join(after, of_cursor).order_by(JobEvent.seq)):
        found.setdefault(cursors[place], []).append(event)
    return found


def _has_ended(cursor: Cursor, last: _Last) -> bool:
    return last.status in TERMINAL and cursor.seen >= last.seq


async def _hand_out(followers: Iterable[_Follower], news: _News, due: set[Cursor]) -> None:
    """Give each stream its news, a few at a time; those that have seen the same get the same."""
    mail = {cursor: _mail(cursor, news, due) for cursor in {each.cursor for each in followers}}
    waiting = [(each, found) for each in _in_turn(followers) if (found := mail[each.cursor])]
    for i, (follower, found) in enumerate(waiting, 1):
        if not follower.is_over:  # the process may stop meanwhile
            follower.cursor = replace(follower.cursor, seen=found.seen)
            follower.send(found.events, last=found.is_last)
        if i % _SLICE == 0:
            await sleep(_BREATH_S)


def _in_turn(followers: Iterable[_Follower]) -> list[_Follower]:
    """Order streams so that a project's first ones wait for no other project's many."""
    of_project, places = Counter[str](), dict[_Follower, int]()
    for follower in followers:
        of_project[follower.cursor.project_id] += 1
        places[follower] = of_project[follower.cursor.project_id]
    return sorted(places, key=places.__getitem__)


def _mail(cursor: Cursor, news: _News, due: set[Cursor]) -> _Mail | None:
    """Return what streams that have seen a job so far are told, if anything."""
    last = news.last.get(cursor.job_id)
    if last is None:  # the job was erased
        return _Mail((), cursor.seen, is_last=True)
    if events := news.events.get(cursor):
        return _Mail(tuple(_event(event) for event in events), events[-1].seq)
    if _has_ended(cursor, last):
        job = news.shown[cursor.job_id].model_dump(mode="json")
        return _Mail((ServerSentEvent(event="done", data=job),), cursor.seen, is_last=True)
    if cursor in due:
        job = news.shown[cursor.job_id].model_dump(mode="json", include={"status", "safety"})
        return _Mail((ServerSentEvent(event="heartbeat", data=job),), cursor.seen)
    return None


def _event(event: JobEvent) -> ServerSentEvent:
    name = "metrics" if event.type == "metrics" else "event"
    return ServerSentEvent(event=name, id=str(event.seq), raw_data=EventOut.model_validate(event).model_dump_json())


def _goodbye() -> ServerSentEvent:
    return ServerSentEvent(comment="the server stops; come back", retry=_RETRY_MS)

"""Stream jobs as server-sent events: their events, heartbeats while nothing happens, and how each ended.

Events are numbered within a job; a client that reconnects sends the last number it saw and misses nothing. One poller
queries the database for all streams of a process, so a stream needs neither a thread nor a query of its own.
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
from app.errors import AppError, InvalidRequest
from app.jobs import service
from app.jobs.schemas import EventOut, JobOut
from app.keys import Principal, find_ended

# Query the database for all streams of a process: job statuses, new events, and callers whose access ended.

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


def begin_cursor(session: Session, project_id: str, job_id: str, seen: int) -> Cursor:
    """Return the cursor of a new stream; raise `InvalidRequest` if `seen` is beyond the job's last event.

    Such a number belongs to another job, or was made up.
    """
    job = service.get(session, project_id, job_id)
    last = session.scalar(select(func.max(JobEvent.seq)).where(JobEvent.job_id == job.id)) or 0
    if seen > last:
        message = f"Last-Event-ID is {seen}, but {job.id} has {last} event(s). Leave it out to see all of them."
        raise InvalidRequest(message, code="invalid_cursor", param="Last-Event-ID")
    return Cursor(project_id, job.id, seen)


def read_news(engine: Engine, cursors: set[Cursor], due: set[Cursor], callers: set[Principal]) -> News:
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
    """Return the cursors with unread events, those with the fewest first, as many as fit in one query."""
    left = {each: last[each.job_id].seq - each.seen for each in cursors if each.job_id in last}
    found, rows = list[Cursor](), 0
    # Streams that are nearly up to date come first, so one that replays a long job does not delay them.
    for cursor, count in sorted(left.items(), key=lambda item: item[1]):
        if count > 0 and rows < ROWS:
            found.append(cursor)
            rows += min(count, AT_ONCE)
    return found


def _events(session: Session, cursors: list[Cursor]) -> dict[Cursor, list[JobEvent]]:
    """Return the events after each cursor, at most `AT_ONCE` events for each."""
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


log = logging.getLogger(__name__)

_LOOK_S, _LEAST_S = 0.5, 0.05  # seconds between two looks: usually, and after a new stream opened
_HEARTBEAT_S = 10.0
_RETRY_MS = 1000
_SLICE, _BREATH_S = 8, 0.01  # streams served in a row, and the pause for other requests after them


@dataclass(frozen=True, slots=True)
class _Mail:
    """The events for all streams with one cursor, and the number of the last event that they have seen then."""

    events: tuple[ServerSentEvent, ...]
    seen: int
    is_last: bool = False


@dataclass(eq=False, slots=True)
class _Follower:
    # One open stream; `mail` holds the events that its client has not read yet.
    cursor: Cursor
    caller: Principal
    told_at: float
    mail: list[ServerSentEvent] = field(default_factory=list)
    has_mail: Event = field(default_factory=Event)
    is_over: bool = False

    def send(self, events: Iterable[ServerSentEvent], *, last: bool = False) -> None:
        self.mail += events
        self.told_at, self.is_over = time.monotonic(), self.is_over or last
        self.has_mail.set()

    def refuse(self, error: AppError) -> None:
        """End the stream with an error; events that its client has not read yet are dropped."""
        self.mail = []
        self.send([_refusal(error)], last=True)


@dataclass(slots=True)
class _Open:
    """The streams of one event loop, and their poller."""

    followers: dict[_Follower, None] = field(default_factory=dict)
    begun: Event = field(default_factory=Event)
    poller: asyncio.Task[None] | None = None
    thread: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))


class Streams:
    """The open streams of a process."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_closed = engine, False
        self._of_loop: RunVar[_Open] = RunVar("streams")

    async def follow(self, cursor: Cursor, caller: Principal) -> AsyncIterator[ServerSentEvent]:
        """Yield the events after the cursor until the job has ended, the process stops or access ends.

        If the caller's key was revoked, has expired or lost a scope, or its browser session ended, the last event is an
        `error` with the body that the caller's next request gets.
        """
        streams, follower = self._here(), _Follower(cursor, caller, time.monotonic())
        streams.followers[follower] = None
        streams.begun.set()
        if self._is_closed:
            follower.send([_goodbye()], last=True)
        # The poller ends with the last stream, and is started again by the next one.
        elif streams.poller is None or streams.poller.done():
            streams.poller = asyncio.create_task(self._poll(streams))
        try:
            while not follower.is_over or follower.mail:
                await follower.has_mail.wait()
                # Swapped without an await in between, so that no event is lost; an empty `mail` tells the poller that
                # all was read.
                mail, follower.mail, follower.has_mail = follower.mail, [], Event()
                for event in mail:
                    yield event
        finally:
            del streams.followers[follower]

    async def close(self) -> None:
        """End all streams now; their clients reconnect after a moment, to another process."""
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
        """Look for news while there are streams; skip a stream whose client has not read its last news."""
        while streams.followers:
            streams.begun = Event()
            open_ones = [each for each in streams.followers if not each.is_over]
            asking = [each for each in open_ones if not each.mail]
            due = {each.cursor for each in asking if time.monotonic() - each.told_at > _HEARTBEAT_S}
            try:
                # Streams with the same cursor are one question: a hundred browsers on one job cost no more than one.
                asked = {each.cursor for each in asking}, due, {each.caller for each in open_ones}
                news = await to_thread.run_sync(read_news, self._engine, *asked, limiter=streams.thread)
            except Exception as error:  # the database may be away for a while; the streams wait for it
                log.warning("the streams get no news: %s", db.why(error))
            else:
                for each in open_ones:
                    if refusal := news.ended.get(each.caller):
                        each.refuse(refusal)
                await _distribute([each for each in asking if not each.is_over], news, due)
            await sleep(_LEAST_S)
            # A stream that opens meanwhile sets `begun` and is served at once instead of at the next look.
            with move_on_after(_LOOK_S - _LEAST_S):
                await streams.begun.wait()


async def _distribute(followers: Iterable[_Follower], news: News, due: set[Cursor]) -> None:
    """Send each stream its news, a few streams at a time; streams with the same cursor share the events."""
    mail = {cursor: _mail(cursor, news, due) for cursor in {each.cursor for each in followers}}
    waiting = [(each, found) for each in _in_turn(followers) if (found := mail[each.cursor])]
    for i, (follower, found) in enumerate(waiting, 1):
        if not follower.is_over:  # the process may stop meanwhile
            follower.cursor = replace(follower.cursor, seen=found.seen)
            follower.send(found.events, last=found.is_last)
        if i % _SLICE == 0:
            await sleep(_BREATH_S)


def _in_turn(followers: Iterable[_Follower]) -> list[_Follower]:
    """Order streams so that a project with many streams does not delay the first streams of others."""
    of_project, places = Counter[str](), dict[_Follower, int]()
    for follower in followers:
        of_project[follower.cursor.project_id] += 1
        places[follower] = of_project[follower.cursor.project_id]
    return sorted(places, key=places.__getitem__)


def _mail(cursor: Cursor, news: News, due: set[Cursor]) -> _Mail | None:
    """Return the news for streams with this cursor; None if there are none."""
    last = news.last.get(cursor.job_id)
    if last is None:  # the job was erased
        return _Mail((), cursor.seen, is_last=True)
    if events := news.events.get(cursor):
        return _Mail(tuple(_event(event) for event in events), events[-1].seq)
    if has_ended(cursor, last):
        job = news.shown[cursor.job_id].model_dump(mode="json")
        return _Mail((ServerSentEvent(event="done", data=job),), cursor.seen, is_last=True)
    if cursor in due:
        job = news.shown[cursor.job_id].model_dump(mode="json", include={"status", "safety"})
        return _Mail((ServerSentEvent(event="heartbeat", data=job),), cursor.seen)
    return None


def _event(event: JobEvent) -> ServerSentEvent:
    name = "metrics" if event.type == "metrics" else "event"
    return ServerSentEvent(event=name, id=str(event.seq), raw_data=EventOut.model_validate(event).model_dump_json())


def _refusal(error: AppError) -> ServerSentEvent:
    """Return the event that ends a stream with an error, in the form of an error's body."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return ServerSentEvent(event="error", data={"error": inner})


def _goodbye() -> ServerSentEvent:
    return ServerSentEvent(comment="the server stops; come back", retry=_RETRY_MS)

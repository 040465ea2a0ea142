"""Share a process fairly between projects: the threads of requests, lanes for slow work, and what may be open at once.

FastAPI runs everything that is not `async` in the process's common threads. A request waits for a place of its project
before it takes a thread or a database connection, so a burst of one project's requests leaves both to others. The
project is found by the request's key if that key was valid before. Requests with unknown keys, and those without a key,
share the places of their address.

The common threads never wait for storage. Work that waits for it, or computes for long, runs in lanes: separate threads
for each kind of work, while the request holds no place. A project may use only its share of a lane's threads; further
requests wait for a while and are then refused with 429. The counts are per process.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from threading import Lock
from typing import TypeVar

from anyio import CapacityLimiter, Semaphore, WouldBlock, fail_after, to_thread
from anyio.lowlevel import RunVar
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from app.errors import TooManyRequests, Unavailable
from app.settings import Settings

Found = TypeVar("Found")
_PROJECTS = 8  # projects that can use their whole share at the same time
_QUEUED = 8  # waiting requests per place of a project's share
_RETRY_AFTER_S = cycle(range(4, 12))  # varied, so that clients refused together do not retry together
_THREADS = 40  # anyio's default
_PLACE_WAIT_S = 30.0
_COMMON_QUEUED = 64  # waiting requests per place
_MOST_KEYS = 10_000  # keys whose project is remembered
_SLOT_RETRY_AFTER_S = 5


class Lane:
    """Threads for one kind of work; each project may use `share` of them, and waits up to `wait_s` seconds for one.

    There are `threads` in total, by default enough for eight projects that use their whole share. Up to `queued`
    requests of a project wait for each place of its share.
    """

    def __init__(
        self, what: str, share: int, wait_s: float, *, threads: int | None = None, queued: int = _QUEUED
    ) -> None:
        self.what, self.share, self.wait_s = what, share, wait_s
        self.threads, self.queued = threads, queued
        self._places: RunVar[_Places] = RunVar(what)

    def project_share(self, project_id: str) -> Share:
        """Return the lane as one project may use it."""
        return Share(self, project_id)

    @property
    def is_full(self) -> bool:
        """True if requests wait for a thread although their project has a free place."""
        return self.places().threads.statistics().tasks_waiting > 0

    def places(self) -> _Places:
        """Return the places of the current event loop."""
        try:
            return self._places.get()
        except LookupError:
            threads = Semaphore(self.threads or self.share * _PROJECTS)
            self._places.set(_Places(threads, CapacityLimiter(math.inf), {}))
            return self._places.get()


@dataclass(frozen=True, slots=True)
class _Places:
    """The free places of a lane on one event loop; each held place is backed by a thread."""

    threads: Semaphore
    started: CapacityLimiter  # unlimited: `threads` is the limit
    shares: dict[str, Semaphore]  # of the projects that use the lane now


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a lane that one project may use.

    A route gets the share of its caller as a dependency (`ReadsDep` and others in `app.deps`):

        return await reads.answer(lambda: read_report(storage, key))
    """

    lane: Lane
    project_id: str

    async def run(self, work: Callable[[], Found]) -> Found:
        """Run `work` in a thread of the lane and return its result; raise 429 or 503 if none becomes free in time."""
        async with self.place(self.lane.wait_s):
            return await to_thread.run_sync(work, limiter=self.lane.places().started)

    async def answer(self, work: Callable[[], BaseModel]) -> Response:
        """Run `work` and return its result as JSON, serialized in the lane's thread too because it may be large."""
        return await self.run(lambda: Response(work().model_dump_json(), media_type="application/json"))

    async def answer_while(self, request: Request, work: Callable[[Callable[[], bool]], BaseModel]) -> Response:
        """Like `answer`, but pass `work` a function that returns True once the client has disconnected."""
        leaving = asyncio.create_task(_until_gone(request))
        try:
            return await self.answer(lambda: work(leaving.done))
        finally:
            leaving.cancel()

    async def finish(self, work: Callable[..., object], *arguments: object) -> None:
        """Run work that must follow an answer; wait for a free thread without a time limit."""
        async with self.place(math.inf):
            await to_thread.run_sync(work, *arguments, limiter=self.lane.places().started)

    async def chunks(self, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the same chunks, each read in the lane; between two chunks a slow client holds no place."""
        while True:
            async with self.place(math.inf):
                chunk = await to_thread.run_sync(next, chunks, None, limiter=self.lane.places().started)
            if chunk is None:
                return
            yield chunk

    @asynccontextmanager
    async def place(self, wait_s: float) -> AsyncIterator[None]:
        """Hold one place of the project's share and one of the lane's threads; raise 429 or 503 on timeout."""
        places = self.lane.places()
        own = places.shares.setdefault(self.project_id, Semaphore(self.lane.share))
        try:
            # Refused at once: at the end of a long queue, the request is likely to time out anyway.
            if wait_s < math.inf and own.statistics().tasks_waiting >= self.lane.queued * self.lane.share:
                raise self._refusal()
            async with _hold_place(own, wait_s, self._refusal()), _hold_place(places.threads, wait_s, self._full()):
                yield
        finally:
            # Semaphores of idle projects are removed, or they accumulate for all projects that were ever seen.
            if own.value == self.lane.share and not own.statistics().tasks_waiting:
                places.shares.pop(self.project_id, None)

    def _refusal(self) -> TooManyRequests:
        message = f"Too many {self.lane.what} of this project at once (limit {self.lane.share})."
        return _later(TooManyRequests(message, code="too_many_at_once"))

    def _full(self) -> Unavailable:
        return _later(Unavailable(f"This server has too many {self.lane.what} at once at the moment; try again."))


class Lanes:
    """The lanes of one process."""

    def __init__(self, settings: Settings) -> None:
        self.reads = Lane("reads of stored objects", settings.reads_at_once, wait_s=5)
        self.previews = Lane("previews and validations", settings.previews_at_once, wait_s=30)
        # Twice the uploads: `Slots` refuses further ones first, and the rest is for other changes of the storage.
        self.writes = Lane("changes of stored objects", 2 * settings.uploads_at_once, wait_s=30)

    def all(self) -> tuple[Lane, ...]:
        """Return the lanes in the order in which full lanes are reported."""
        return self.reads, self.previews, self.writes


Refusal = TypeVar("Refusal", TooManyRequests, Unavailable)


def _later(error: Refusal) -> Refusal:
    error.retry_after_s = next(_RETRY_AFTER_S)
    return error


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _hold_place(places: Semaphore, wait_s: float, refusal: Exception) -> AsyncIterator[None]:
    try:
        places.acquire_nowait()
    except WouldBlock:
        try:
            with fail_after(None if wait_s == math.inf else wait_s):
                await places.acquire()
        except TimeoutError:
            raise refusal from None
    try:
        yield
    finally:
        places.release()


class CommonThreads:
    """The places of one process in its common threads, `share` of them for each project.

    `cookie` is the name of the cookie of a browser session.
    """

    def __init__(self, share: int, cookie: str) -> None:
        self._cookie = cookie
        self.lane = Lane("requests", share, _PLACE_WAIT_S, threads=_THREADS, queued=_COMMON_QUEUED)
        self._lock = Lock()
        self._projects: OrderedDict[bytes, str] = OrderedDict()  # by digest of key or cookie, least recently used first

    def note_project(self, request: Request, project_id: str) -> None:
        """Remember the project of the request's key for later requests."""
        digest = self._credential_digest(request)
        with self._lock:
            self._projects[digest] = project_id
            self._projects.move_to_end(digest)
            if len(self._projects) > _MOST_KEYS:
                self._projects.popitem(last=False)

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Hold one place of the project's share; raise 429 if none becomes free in time.

        A request never holds two places: a nested call does nothing.
        """
        # A dependency may hold the place already; a second one of the same request could wait for the first forever.
        if getattr(request.state, "has_place", False):
            yield
            return
        async with self.lane.project_share(self._owner(request)).place(self.lane.wait_s):
            request.state.has_place = True
            try:
                yield
            finally:
                request.state.has_place = False

    def _owner(self, request: Request) -> str:
        with self._lock:
            project_id = self._projects.get(self._credential_digest(request))
        # An unknown key is not looked up here: that would need the database, before a place is held.
        return project_id or f"address {request.client.host if request.client else ''}"

    def _credential_digest(self, request: Request) -> bytes:
        credential = request.headers.get("authorization") or request.cookies.get(self._cookie) or ""
        return hashlib.sha256(credential.encode()).digest()


def common_threads(request: Request) -> CommonThreads:
    """Return the common threads of the process that handles the request."""
    found: CommonThreads = request.app.state.common_threads
    return found


async def hold_place(request: Request) -> AsyncIterator[None]:
    """Hold one of the project's places in the common threads while a synchronous route runs."""
    endpoint = getattr(request.scope.get("route"), "endpoint", None)
    if endpoint is None or inspect.iscoroutinefunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        yield
        return
    async with common_threads(request).place(request):
        yield


class Slots:
    """Counts the slots of one kind that each project uses; `what` and `code` appear in the error for one too many."""

    def __init__(self, what: str, code: str) -> None:
        self._what, self._code = what, code
        self._lock = Lock()
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, project_id: str, at_once: int) -> Iterator[None]:
        """Hold one of a project's slots during the block; raise 429 if all `at_once` are taken."""
        self._take(project_id, at_once)
        try:
            yield
        finally:
            self._give_back(project_id)

    def _take(self, project_id: str, at_once: int) -> None:
        with self._lock:
            if self._open[project_id] < at_once:
                self._open[project_id] += 1
                return
        message = f"Too many concurrent {self._what} for this project (limit {at_once})."
        error = TooManyRequests(message, code=self._code)
        error.retry_after_s = _SLOT_RETRY_AFTER_S
        raise error

    def _give_back(self, project_id: str) -> None:
        with self._lock:
            self._open[project_id] -= 1
            # Projects without open slots are forgotten.
            if not self._open[project_id]:
                del self._open[project_id]

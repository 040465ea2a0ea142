"""Lanes: work that waits for the storage, or computes for long, each kind in threads of its own.

The threads that all other requests share never wait for the storage. Of a lane's threads a project has only its share;
what exceeds it waits its turn for a while and is then refused with 429. Counts are those of one process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

from anyio import CapacityLimiter, Semaphore, WouldBlock, fail_after, to_thread
from anyio.lowlevel import RunVar
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from app.errors import TooManyRequests, Unavailable
from app.settings import Settings

Found = TypeVar("Found")

_PROJECTS = 8  # that a lane has threads for when each of them uses its whole share
_QUEUED = 8  # requests that wait for each place of a project's share
_RETRY_AFTER_S = cycle(range(4, 12))  # not the same for all that are refused at one moment: they would come back at one


class Lane:
    """Threads for one kind of work; `share` of them are one project's, for which a request waits up to `wait_s`.

    There are `threads` in all; by default as many as eight projects use together. `queued` requests of a project wait
    for each place of its share.
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
        """Whether requests wait for a thread although their project has a place."""
        return self.places().threads.statistics().tasks_waiting > 0

    def places(self) -> _Places:
        """Return the places of the event loop that asks."""
        try:
            return self._places.get()
        except LookupError:
            threads = Semaphore(self.threads or self.share * _PROJECTS)
            self._places.set(_Places(threads, CapacityLimiter(math.inf), {}))
            return self._places.get()


@dataclass(frozen=True, slots=True)
class _Places:
    """What is left of a lane on one event loop; who has a place has a thread."""

    threads: Semaphore
    started: CapacityLimiter  # without a limit: `threads` is one
    shares: dict[str, Semaphore]  # of the projects that use the lane


@dataclass(frozen=True, slots=True)
class Share:
    """A lane for one project."""

    lane: Lane
    project_id: str

    async def run(self, work: Callable[[], Found]) -> Found:
        """Return what `work` returns in a thread of the lane; 429 or 503 if none becomes free in time."""
        async with self.place(self.lane.wait_s):
            return await to_thread.run_sync(work, limiter=self.lane.places().started)

    async def answer(self, work: Callable[[], BaseModel]) -> Response:
        """Return what `work` returns as JSON, which is written in the lane's thread too: answers may be large."""
        return await self.run(lambda: Response(work().model_dump_json(), media_type="application/json"))

    async def answer_while(self, request: Request, work: Callable[[Callable[[], bool]], BaseModel]) -> Response:
        """Like `answer`; `work` is given a function that tells whether the client has left."""
        leaving = asyncio.create_task(_until_gone(request))
        try:
            return await self.answer(lambda: work(leaving.done))
        finally:
            leaving.cancel()

    async def finish(self, work: Callable[..., object], *arguments: object) -> None:
        """Do what has to be done after an answer, however long it waits for its place."""
        async with self.place(math.inf):
            await to_thread.run_sync(work, *arguments, limiter=self.lane.places().started)

    async def chunks(self, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the same chunks, each read in the lane; between two of them a slow client holds no place."""
        while True:
            async with self.place(math.inf):
                chunk = await to_thread.run_sync(next, chunks, None, limiter=self.lane.places().started)
            if chunk is None:
                return
            yield chunk

    @asynccontextmanager
    async def place(self, wait_s: float) -> AsyncIterator[None]:
        """Hold one place of the project's share, and one of the lane's threads."""
        places = self.lane.places()
        own = places.shares.setdefault(self.project_id, Semaphore(self.lane.share))
        try:
            if wait_s < math.inf and own.statistics().tasks_waiting >= self.lane.queued * self.lane.share:
                raise self._refusal()
            async with _hold_place(own, wait_s, self._refusal()), _hold_place(places.threads, wait_s, self._full()):
                yield
        finally:
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
        # Uploads are refused before they come here: what is left for the share is what else changes the storage.
        self.writes = Lane("changes of stored objects", 2 * settings.uploads_at_once, wait_s=30)

    def all(self) -> tuple[Lane, ...]:
        """Return the lanes in the order in which full ones are reported."""
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

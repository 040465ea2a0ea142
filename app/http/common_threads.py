"""Share the process's thread pool fairly: the requests of one project use only a part of its threads at once.

FastAPI runs everything that is not `async` in these threads. A request waits for a place of its project before it takes
a thread or a database connection, so a burst of one project's requests leaves both to others; while a request waits for
the storage, a model or an upload, it holds no place (`app.http.lanes`). The project is found by the request's key if
that key was valid before. Requests with unknown keys, and those without a key, share the places of their address.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Lock

from fastapi import Request

from app.http.lanes import Lane

_THREADS = 40  # anyio's default
_WAIT_S = 30.0
_QUEUED = 64  # waiting requests per place
_MOST_KEYS = 10_000  # keys whose project is remembered


class CommonThreads:
    """The places of one process in its common threads, `share` of them for each project.

    `cookie` is the name of the cookie of a browser session.
    """

    def __init__(self, share: int, cookie: str) -> None:
        self._cookie = cookie
        self.lane = Lane("requests", share, _WAIT_S, threads=_THREADS, queued=_QUEUED)
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

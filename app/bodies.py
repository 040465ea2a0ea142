"""Bodies of uploads, read as they arrive: each holds a thread, so only so many of a project, and none that trickles."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from threading import Lock

from anyio import current_time, fail_after, from_thread

from app.errors import Stalled, TooManyRequests

WAIT_S = 30.0  # that we wait for the next LEAST_BYTES; what we do with them is not counted
LEAST_BYTES = 1 << 16
_RETRY_AFTER_S = 5


class Bodies:
    """How many bodies of each project this process reads now."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, project_id: str, at_once: int) -> Iterator[None]:
        """Room for one body more of a project."""
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
        message = f"Your project sends {at_once} uploads already; wait until one of them has ended."
        error = TooManyRequests(message, code="too_many_uploads")
        error.retry_after_s = _RETRY_AFTER_S
        raise error

    def _give_back(self, project_id: str) -> None:
        with self._lock:
            self._open[project_id] -= 1
            if not self._open[project_id]:
                del self._open[project_id]


def chunks(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """A request's body, fetched from the event loop's thread one chunk at a time."""
    waited_s, brought = 0.0, 0

    async def fetch() -> bytes | None:
        nonlocal waited_s
        began = current_time()
        try:
            with fail_after(WAIT_S - waited_s):
                return await anext(stream, None)
        except TimeoutError:
            message = f"The body comes too slowly: {brought} bytes in {WAIT_S:g} s, at least {LEAST_BYTES} are needed."
            raise Stalled(message) from None
        finally:
            waited_s += current_time() - began

    while (chunk := from_thread.run(fetch)) is not None:
        brought += len(chunk)
        if brought >= LEAST_BYTES:
            waited_s, brought = 0.0, 0
        yield chunk

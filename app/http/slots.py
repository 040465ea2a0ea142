"""Limit what one project has open at the same time in this process, such as uploads and streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from app.errors import TooManyRequests

_RETRY_AFTER_S = 5


class Slots:
    """Counts what each project has open of one kind; `what` and `code` appear in the error for one too many."""

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
        error.retry_after_s = _RETRY_AFTER_S
        raise error

    def _give_back(self, project_id: str) -> None:
        with self._lock:
            self._open[project_id] -= 1
            # Projects without open slots are forgotten.
            if not self._open[project_id]:
                del self._open[project_id]

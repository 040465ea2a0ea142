"""Wait for storage that is away inside an attempt, while its lease is kept and its owner can still cancel it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TypeVar

import structlog

from app.errors import AppError
from spard.config.patience import Patience
from worker.failures import Failure, Fault, failure

_LOOK_S = 1.0  # between two looks at whether the attempt is to end
_T = TypeVar("_T")

log = structlog.get_logger(__name__)


@contextmanager
def call_if_slow(seconds: float, tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once, in another thread, if the block takes longer than `seconds`; wait for the call at its end."""
    is_over = Event()

    def watch() -> None:
        if not is_over.wait(seconds):
            tell()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Retries calls that fail because of the surroundings, such as the storage.

    first_s, longest_s  the first and the longest wait in seconds; each wait is twice the one before
    note                called with each failure before the wait
    go_on               called about once a second during a wait; raises to end the attempt
    ended               an event that ends the current wait early
    clock               returns seconds
    """

    first_s: float
    longest_s: float
    note: Callable[[Failure], None]
    go_on: Callable[[], None]
    ended: Event
    clock: Callable[[], float] = time.monotonic

    def insist(self, do: Callable[[], _T], limit_s: float) -> _T:
        """Call `do` until it succeeds and return its result; raise its last error once the waits add up to `limit_s`.

        An error with a fault other than the surroundings is raised at once.
        """
        waits = Patience(limit_s, self.first_s, self.longest_s).waits()
        while True:
            try:
                return do()
            except AppError as error:
                what, wait_s = failure(error), next(waits, None)
                if what.fault is not Fault.surroundings or wait_s is None:
                    raise
                log.warning("waiting", code=what.code, seconds=wait_s, why=str(error))
            self.note(what)
            self._wait(wait_s)

    def _wait(self, seconds: float) -> None:
        until = self.clock() + seconds
        self.go_on()
        while (left := until - self.clock()) > 0:
            self.ended.wait(min(left, _LOOK_S))
            self.go_on()

"""Signs of life of a long-running command: lines on standard error, also if that is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

EVERY_S = 10.0  # of silence


class Signs:
    """Prints the command's current activity, and repeats it with the elapsed seconds after `every_s` of silence.

    `print_line` is also called from a thread; it defaults to writing to standard error.
    """

    def __init__(self, every_s: float = EVERY_S, print_line: Callable[[str], None] | None = None) -> None:
        self._every_s, self._print_line = every_s, print_line or _print_to_stderr
        self._lock, self._end = Lock(), Event()
        self._doing, self._detail = "", ""
        self._since = self._printed_at = time.monotonic()
        self._thread = Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def begin(self, doing: str, *, is_printed: bool = True) -> None:
        """Set the current activity, and print it unless the caller has printed it."""
        with self._lock:
            self._doing, self._detail, self._since = doing, "", time.monotonic()
            self._print(doing, is_printed=is_printed)

    def note(self, line: str, *, is_printed: bool = True) -> None:
        """Print a line about the current activity; with `is_printed=False` the caller has printed it."""
        with self._lock:
            self._print(line, is_printed=is_printed)

    def detail(self, detail: str) -> None:
        """Set the progress that the next sign shows."""
        with self._lock:
            self._detail = f": {detail}"

    def _print(self, line: str, *, is_printed: bool) -> None:
        self._printed_at = time.monotonic()
        if is_printed:
            self._print_line(line)

    def _repeat(self) -> None:
        wait_s = self._every_s
        while not self._end.wait(wait_s):
            with self._lock:
                now = time.monotonic()
                # Other lines may have been printed while this thread slept, so it waits for the rest of the silence.
                wait_s = self._printed_at + self._every_s - now
                if wait_s <= 0:
                    self._print(
                        f"{self._doing}{self._detail} ({now - self._since:.0f} s so far)", is_printed=bool(self._doing)
                    )
                    wait_s = self._every_s


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

"""A readers-writer lock for a vLLM server: requests share the server, and loading an adapter is exclusive.

vLLM servers that loaded an adapter while decoding have answered with another customer's adapter. The locks are files
beside the adapters, so they work between all API processes that use one server, and are released when a process ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from app.inference.protocol import busy

_LOOK_S = 0.01  # between two attempts to take a lock
_LONGEST_LOAD_S = 300.0  # a load that takes longer belongs to a process that was stopped, which keeps its locks
PAUSE_S = 5 * _LOOK_S  # between two loads, so that waiting requests get in
_MODE = 0o600


class Gate:
    """The gate of one server, with lock files in `folder`; without a folder no adapter can be loaded and nobody waits.

    A load takes `turn` and then `traffic` exclusively; a request needs `turn` free and shares `traffic`. So a load that
    waits for running requests already keeps new ones out.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._users, self._traffic = folder, 0, -1
        self._rests_until = 0.0

    async def enter(self) -> None:
        """Share the server until `leave`; wait while a load has it or waits for it.

        Raises 429 `engine_busy` if loads keep it for 5 minutes.
        """
        end = time.monotonic() + _LONGEST_LOAD_S
        while self._folder is not None and not self._enter():
            if time.monotonic() > end:
                raise busy("Another process of the service has been loading an adapter for too long.")
            await asyncio.sleep(_LOOK_S)

    def leave(self) -> None:
        """End one `enter`."""
        if self._folder is not None:
            self._users -= 1
            if not self._users:
                os.close(self._traffic)

    @asynccontextmanager
    async def share(self) -> AsyncIterator[None]:
        """Share the server with other requests inside the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    @asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """Use the server exclusively inside the block, while new requests wait.

        Raises 429 `engine_busy` if running replies do not end within `patience_s`. After that, no load tries again for
        as long, so that loads delay requests for at most half of the time.
        """
        if self._folder is None or time.monotonic() < self._rests_until:
            raise _no_turn()
        end, locks = time.monotonic() + patience_s, list[int]()
        try:
            for name in ("turn", "traffic"):
                locks.append(self._open(name))
                while not _lock(locks[-1], fcntl.LOCK_EX):
                    if time.monotonic() > end:
                        self._rests_until = time.monotonic() + patience_s
                        raise _no_turn()
                    await asyncio.sleep(_LOOK_S)
            yield
        finally:
            for lock in locks:
                os.close(lock)

    def _enter(self) -> bool:
        """Try to share the server; return False if a load has it or waits for it."""
        turn = self._open("turn")
        try:
            if not _lock(turn, fcntl.LOCK_SH):
                return False
            if not self._users:
                traffic = self._open("traffic")
                if not _lock(traffic, fcntl.LOCK_SH):
                    os.close(traffic)
                    return False
                self._traffic = traffic
            self._users += 1
            return True
        finally:
            os.close(turn)

    def _open(self, name: str) -> int:
        folder = self._folder or Path()
        path = folder / f".{name}.lock"
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _no_turn() -> Exception:
    return busy("An adapter has to be loaded, and the server has no pause between replies at the moment.")

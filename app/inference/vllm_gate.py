"""Turns at a vLLM server: requests share it, and a load of an adapter has it to itself.

A server that loads an adapter while others decode has answered with another customer's adapter. The turns are file
locks beside the adapters, so that they hold among all API processes that use one server, and end with a process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from app.inference.engine_errors import busy

_LOOK_S = 0.01  # between two looks whether a lock is free
PAUSE_S = 5 * _LOOK_S  # between two loads, in which requests that wait find their turn
_MODE = 0o600


class Gate:
    """Locks in a folder; None: nothing is ever loaded, and nobody waits."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._users, self._traffic = folder, 0, -1
        self._rests_until = 0.0

    async def enter(self) -> None:
        """Use the server beside other requests until `leave`; wait while a load has it, or waits for it."""
        while self._folder is not None and not self._enter():
            await asyncio.sleep(_LOOK_S)

    def leave(self) -> None:
        """Use the server no longer."""
        if self._folder is not None:
            self._users -= 1
            if not self._users:
                os.close(self._traffic)

    @asynccontextmanager
    async def share(self) -> AsyncIterator[None]:
        """Use the server beside other requests within the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    @asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """Have the server to oneself; 429 `engine_busy` where running replies do not end in time.

        New requests wait meanwhile. After such a failure as much time passes before the next try, so that loads hold
        requests back for half of the time at most.
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
        """Join the requests that use the server; False where a load has its turn, or waits for one."""
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

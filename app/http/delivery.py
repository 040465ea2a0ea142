"""When the bytes of a response have left this process, so that a kill loses no count and adds none.

uvicorn takes bytes and returns before the kernel has all of them; those of a slow client wait in this process and die
with it. A response that counts what it sends announces the count, and it is noted as soon as the kernel has the bytes.

While the kernel takes them the socket is corked: the client, which could be waked and run in our place, gets them only
after the count was stored. What is in the kernel is delivered even if the process is killed then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import Scope

TRANSPORT = "transport"  # in a request's state, where `app.http.connections` serves it
_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux alone has it
_TCP = (socket.AF_INET, socket.AF_INET6)


class ObservedTransport:
    """A transport that says when the kernel has the bytes of a write; everything else is the transport's own."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner
        self._next: Callable[[], None] | None = None  # to call when the next write has left
        self._on_its_way: Callable[[], None] | None = None
        self._at_end: list[Callable[[], None]] = []
        self._is_strict = self._is_corked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def announce(self, note: Callable[[], None]) -> None:
        """Have `note` called when all bytes of the next write are with the kernel; never if they do not get there."""
        if not self._is_strict:
            self._is_strict = True
            self._inner.set_write_buffer_limits(high=0)  # so that `resume_writing` means that nothing waits here
        self._next = note

    def write(self, data: bytes) -> None:
        """Write, and call what was announced unless bytes have to wait."""
        if self._next is None:
            self._inner.write(data)
            return
        self._on_its_way, self._next = self._next, None
        self._cork(True)
        self._inner.write(data)
        if not self._inner.get_write_buffer_size() and not self._inner.is_closing():  # it closes where a write failed
            self.note_empty()

    def note_empty(self) -> None:
        """Call what was announced: no bytes wait here any more."""
        note, self._on_its_way = self._on_its_way, None
        if note is not None:
            note()
        self._cork(False)
        self._end_response()

    def note_lost(self) -> None:
        """Forget what was announced: the connection is gone, with all bytes that waited here."""
        self._on_its_way = self._next = None
        self._end_response()

    def finish(self, done: Callable[[], None]) -> None:
        """Have `done` called when no bytes of the response wait here any more, or the connection is gone."""
        self._next = None
        self._at_end.append(done)
        if not self._inner.get_write_buffer_size():
            self._end_response()

    def _end_response(self) -> None:
        waiting, self._at_end = self._at_end, []
        if waiting and self._is_strict:
            self._is_strict = False
            self._inner.set_write_buffer_limits()
        for done in waiting:
            done()

    def _cork(self, is_on: bool) -> None:
        """Hold back what the kernel has, or let it go; where that is not possible, it goes at once."""
        if is_on == self._is_corked or _CORK is None:
            return
        found = self._inner.get_extra_info("socket")
        if found is not None and found.family in _TCP:
            with suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, _CORK, int(is_on))
                self._is_corked = is_on


class Delivery:
    """How much of one response has left, passed to `note` as a count that only grows.

    Behind another server than `app.http.connections` a count is noted when that server has taken the bytes.
    """

    def __init__(self, scope: Scope, note: Callable[[int], None]) -> None:
        self._transport: ObservedTransport | None = scope.get("state", {}).get(TRANSPORT)
        self._note, self._count = note, 0

    def announce(self, count: int) -> None:
        """Say what the count is when the bytes that are sent next have left."""
        self._count = count
        if self._transport is not None:
            self._transport.announce(partial(self._note, count))

    def accept(self) -> None:
        """Say that the server has taken the bytes that were announced."""
        if self._transport is None:
            self._note(self._count)

    def finish(self, done: Callable[[], None]) -> None:
        """Call `done` when nothing of the response waits in this process any more."""
        if self._transport is None:
            done()
        else:
            self._transport.finish(done)

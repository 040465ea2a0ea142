"""Track when the bytes of a response have left this process, so that counts stay exact even if it is killed.

uvicorn accepts bytes before the kernel has all of them; those of a slow client wait in this process and are lost with
it. A response that counts what it sends announces the count, and the count is stored as soon as the kernel has the
bytes. While the kernel takes them the socket is corked, so the client, which might be scheduled instead of us, gets
them only after the count was stored. Bytes in the kernel are delivered even if the process is killed then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import Scope

TRANSPORT = "transport"  # key in a request's state, set by `app.http.connections`
_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux only
_TCP = (socket.AF_INET, socket.AF_INET6)


class ObservedTransport:
    """A transport that reports when the kernel has the bytes of a write; the rest is delegated."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner
        self._next: Callable[[], None] | None = None  # to call when the next write has left
        self._on_its_way: Callable[[], None] | None = None
        self._at_end: list[Callable[[], None]] = []
        self._is_strict = self._is_corked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def announce(self, note: Callable[[], None]) -> None:
        """Call `note` when the kernel has all bytes of the next write.

        It is never called if the connection is lost before.
        """
        if not self._is_strict:
            self._is_strict = True
            self._inner.set_write_buffer_limits(high=0)  # then `resume_writing` means an empty buffer
        self._next = note

    def write(self, data: bytes) -> None:
        """Write, and call the announced `note` unless bytes are still buffered."""
        if self._next is None:
            self._inner.write(data)
            return
        self._on_its_way, self._next = self._next, None
        self._cork(True)
        self._inner.write(data)
        if not self._inner.get_write_buffer_size() and not self._inner.is_closing():  # closing after a failed write
            self.note_empty()

    def note_empty(self) -> None:
        """Call the announced `note`, because no bytes are buffered any more."""
        note, self._on_its_way = self._on_its_way, None
        if note is not None:
            note()
        self._cork(False)
        self._end_response()

    def note_lost(self) -> None:
        """Drop the announced `note`: the connection and its buffered bytes are lost."""
        self._on_its_way = self._next = None
        self._end_response()

    def finish(self, done: Callable[[], None]) -> None:
        """Call `done` when no bytes of the response are buffered any more, or the connection is lost."""
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
        """Cork or uncork the socket; without support for corking, bytes are sent at once."""
        if is_on == self._is_corked or _CORK is None:
            return
        found = self._inner.get_extra_info("socket")
        if found is not None and found.family in _TCP:
            with suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, _CORK, int(is_on))
                self._is_corked = is_on


class Delivery:
    """How much of one response has left the process, passed to `note` as a count that only grows.

    On a server without `app.http.connections`, a count is reported when that server has accepted the bytes.
    """

    def __init__(self, scope: Scope, note: Callable[[int], None]) -> None:
        self._transport: ObservedTransport | None = scope.get("state", {}).get(TRANSPORT)
        self._note, self._count = note, 0

    def announce(self, count: int) -> None:
        """Set the count that is reported when the bytes that are sent next have left."""
        self._count = count
        if self._transport is not None:
            self._transport.announce(partial(self._note, count))

    def accept(self) -> None:
        """Report that the server has accepted the announced bytes."""
        if self._transport is None:
            self._note(self._count)

    def finish(self, done: Callable[[], None]) -> None:
        """Call `done` when no bytes of the response are buffered in this process any more."""
        if self._transport is None:
            done()
        else:
            self._transport.finish(done)

"""Limit the open connections of a process and the time in which headers arrive, and track which bytes have left.

uvicorn waits for the headers of a request without limit, and a process without free descriptors answers nobody.
`uvicorn --http app.http.connections:BoundedHttp` and `spard up` use this protocol instead of uvicorn's; the service
warns of servers that do not. If too many connections are open, those that have been idle longest are closed; a
connection with a request in progress is never closed for another.

uvicorn accepts bytes before the kernel has all of them; those of a slow client wait in this process and are lost with
it if it is killed. A response that counts what it sends announces the count, and the count is stored as soon as the
kernel has the bytes. While the kernel takes them the socket is corked, so the client, which might be scheduled instead
of us, gets them only after the count was stored. Bytes in the kernel are delivered even if the process is killed then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import _TrustedHosts
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from app.settings import get_settings

# Raise the number of files and connections that a process may have open.

_MOST = 65_536  # requested at most; ordinary load needs no more
log = logging.getLogger(__name__)
SERVER = "app.http.connections:BoundedHttp"
UNBOUNDED = (
    "The server waits for the headers of a request without end, and for any number of connections: start it with "
    f"uvicorn's --http {SERVER}."
)


def raise_limit() -> int:
    """Raise this process's limit on open descriptors as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


HEADERS_S = 10.0  # from the first byte of a request, or from the connection, to the end of its headers

_OTHERS = 4  # one in so many descriptors is reserved for databases, files and processes

_LATE = 408, "Request Timeout", "request_timeout", f"The headers of a request have to arrive within {HEADERS_S:g} s."

_CROWDED = (
    *(429, "Too Many Requests", "too_many_connections"),
    "Too many connections are open from this address; close some, or use one for several requests.",
)

_FULL = 503, "Service Unavailable", "unavailable", "This server has too many connections open; try again."

REFUSALS = (_LATE, _CROWDED, _FULL)  # status, its name, code, message

Refusal = tuple[int, str, str, str]  # status, its name, the error's code and its message


class Connections:
    """The open connections of one process; the idle ones in the order in which they became idle."""

    def __init__(self, most: int, most_per_address: int | None, trusted: str | list[str]) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._trusted = _TrustedHosts(trusted)  # proxies, which carry the requests of many clients
        self._open: Counter[str] = Counter()
        self._waiting: dict[BoundedHttp, str] = {}  # with the address, longest idle first

    def admit(self, connection: BoundedHttp, address: str) -> Refusal | None:
        """Admit a new connection and return None, or return the refusal.

        If a limit is reached, an idle connection is closed to make room.
        """
        # A trusted proxy brings the connections of many clients.
        limit = None if address in self._trusted else self._most_per_address
        if limit is not None and self._open[address] >= limit and not self._close_one(address):
            return _CROWDED
        if self._open.total() >= self._most and not self._close_one(None):
            return _FULL
        self._open[address] += 1
        return None

    def leave(self, connection: BoundedHttp, address: str) -> None:
        """Remove an admitted connection that has ended."""
        self._waiting.pop(connection, None)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def note_waiting(self, connection: BoundedHttp, address: str) -> None:
        """Mark a connection as idle, at the end of the line."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = address

    def note_request(self, connection: BoundedHttp) -> None:
        """Mark a connection as busy: it is no longer closed to make room."""
        self._waiting.pop(connection, None)

    def _close_one(self, address: str | None) -> bool:
        """Close the connection that has been idle longest, of an address or of any; return False if none is idle."""
        found = next(self._list_waiting(address), None)
        if found is not None:
            # `drop` leaves the table itself, so the iterator above is not used any more.
            found.drop()
        return found is not None

    def _list_waiting(self, address: str | None) -> Iterator[BoundedHttp]:
        return (each for each, its in self._waiting.items() if address is None or its == address)


_of_server: WeakKeyDictionary[ServerState, Connections] = WeakKeyDictionary()  # one per process


def _connections(config: Config, state: ServerState) -> Connections:
    """Return the connections of a server; created at its first connection."""
    if state not in _of_server:
        descriptors = raise_limit()
        most = descriptors - descriptors // _OTHERS
        trusted = config.forwarded_allow_ips
        _of_server[state] = Connections(most, get_settings().connections_per_address, trusted)
    return _of_server[state]


class BoundedHttp(H11Protocol):
    """uvicorn's protocol with a deadline for headers and a limit on open connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = _connections(config, server_state)
        self._address: str | None = None  # None: not admitted
        self._deadline: asyncio.TimerHandle | None = None
        self._has_begun = False  # the next request's first byte has arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the new connection, or answer with an error and close it."""
        self._observed = ObservedTransport(transport)
        self.app_state = {**self.app_state, TRANSPORT: self._observed}
        super().connection_made(cast(asyncio.Transport, self._observed))
        address = self.client[0] if self.client else ""
        if refusal := self._table.admit(self, address):
            self._refuse(refusal)
            return
        self._address = address
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place."""
        super().connection_lost(exc)
        self._leave()
        self._observed.note_lost()

    def resume_writing(self) -> None:
        """Let the application write again, and report that the write buffer is empty if it is."""
        if not self._observed.get_write_buffer_size():
            self._observed.note_empty()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Process received bytes; the deadline runs until they contain a request's headers."""
        if self._address is None:
            return
        cycle, self._has_begun = self.cycle, True
        super().data_received(data)
        if self.cycle is not cycle:
            self._end_wait()
        # uvicorn replaces `cycle` once the headers are complete; until then these bytes begin a request.
        elif self._waits and self._deadline is None:
            self._start_deadline()

    def on_response_complete(self) -> None:
        """Mark the connection as idle; uvicorn's keep-alive limit applies until the next request's first byte."""
        cycle = self.cycle
        super().on_response_complete()
        if self._address is not None and self.cycle is cycle:
            self._table.note_waiting(self, self._address)

    def drop(self) -> None:
        """Close an idle connection to make room for another one."""
        self._leave()
        self.transport.close()

    @property
    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_request(self) -> None:
        if self._address is not None:
            self._table.note_waiting(self, self._address)
        self._start_deadline()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_S, self._end_late)

    def _end_wait(self) -> None:
        self._table.note_request(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._has_begun = None, False

    def _end_late(self) -> None:
        self._deadline = None
        if not self._waits or self.transport.is_closing():
            return
        if self._has_begun:
            self._refuse(_LATE)
        else:
            self.transport.close()

    def _leave(self) -> None:
        self._end_wait()
        if self._address is not None:
            self._table.leave(self, self._address)
            self._address = None

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error in OpenAI's envelope, without the application, and close the connection."""
        status, name, code, message = refusal
        kind = "invalid_request_error" if status == 408 else "server_error" if status == 503 else "rate_limit_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
        head = f"HTTP/1.1 {status} {name}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        again = "" if status == 408 else "retry-after: 1\r\n"
        self.transport.write(f"{head}{again}connection: close\r\n\r\n{body}".encode())
        self.transport.close()


def is_bounded(scope: Scope) -> bool:
    """Return True if a request came through a server with these limits."""
    return TRANSPORT in scope.get("state", {})


def warn_if_unbounded(scope: Scope) -> None:
    """Log a warning if a request's server does not have these limits."""
    if not is_bounded(scope):
        log.warning("%s", UNBOUNDED)


# Track when the bytes of a response have left this process, so that counts stay exact even if it is killed.

TRANSPORT = "transport"  # key in a request's state
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
        """Set the count to report once the bytes that are sent next have left the process."""
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

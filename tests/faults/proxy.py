"""A wire that can be hurt: a TCP proxy in front of a server, one thread for each direction of a connection.

open    bytes pass                 slow     bytes pass, each piece `DELAY_S` late
silent  bytes of both directions   halved   requests reach the server, answers are swallowed: who asked does not
        are swallowed                       know whether it was done
refusing  a new connection ends at once

A swallowed byte is lost, as its connection is from then on: `cut` ends all connections, as a network does in the end.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["open", "slow", "silent", "halved", "refusing"]
Plan = Callable[[bytes], bytes | None]  # what to answer to the head of a request ourselves; None: let it pass

DELAY_S = 0.05


class Proxy:
    """Listens until closed. `mode` holds for all connections from the moment it is set."""

    def __init__(self, host: str, port: int, plan: Plan | None = None) -> None:
        self.mode: Mode = "open"
        self.swallowed = self.cuts = self.accepted = 0
        self._target, self._plan = (host, port), plan
        self._lock, self._ends = Lock(), set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection there is."""
        with self._lock:
            ends, self._ends = self._ends, set()
        self.cuts += len(ends) // 2
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                if self.mode == "refusing":
                    client.close()
                    continue
                Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target) as server:
            with self._lock:
                self._ends |= {client, server}
            back = Thread(target=self._pump, args=(server, client, False), daemon=True)
            back.start()
            self._pump(client, server, True)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if is_request and self._plan and (answer := self._plan(piece)):
                    source.sendall(answer)
                    break
                if self.mode == "silent" or (self.mode == "halved" and not is_request):
                    self.swallowed += len(piece)
                    continue
                if self.mode == "slow":
                    time.sleep(DELAY_S)
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(url: str, plan: Plan | None = None) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of the server that a URL names, and the URL that leads through it."""
    parts = urlsplit(url)
    wire = Proxy(parts.hostname or "", parts.port or 0, plan)
    user = f"{parts.username}@" if parts.username else ""
    try:
        yield wire, parts._replace(netloc=f"{user}127.0.0.1:{wire.port}").geturl()
    finally:
        wire.close()

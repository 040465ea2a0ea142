"""A pooler of connections in transaction mode, for tests where PgBouncer is not installed.

It does what PgBouncer does with `pool_mode = transaction`: a client gets a connection of the server's with each
transaction, the next one with the next, and a process id of its own; `options` are refused or ignored.
"""

from __future__ import annotations

import queue
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import make_url

_SSL_REQUEST = 80877103
_ANSWERED = (b"Q", b"S")  # a query or a Sync: the server then answers up to ReadyForQuery


@contextmanager
def pool_transactions(url: str, servers: int = 2, *, ignores_options: bool = False) -> Iterator[str]:
    """Yield the address of a pooler in front of a PostgreSQL server that asks for no password."""
    target = make_url(url)
    idle: queue.Queue[socket.socket] = queue.Queue()
    opened = [_open_server(target.host or "", target.port or 5432, str(target.database)) for _ in range(servers)]
    for server in opened:
        idle.put(server)

    class Client(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                if _greet(self.request, ignores_options=ignores_options):
                    _serve(self.request, idle)

    class Pooler(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Pooler(("127.0.0.1", 0), Client) as pooler:
        threading.Thread(target=pooler.serve_forever, args=(0.01,)).start()
        try:
            yield target.set(host="127.0.0.1", port=pooler.server_address[1]).render_as_string(hide_password=False)
        finally:
            pooler.shutdown()
            for server in opened:
                server.close()


def _open_server(host: str, port: int, database: str) -> socket.socket:
    """Log in to the server and read its greeting."""
    server = socket.create_connection((host, port))
    words = b"".join(word.encode() + b"\0" for word in ("user", "postgres", "database", database)) + b"\0"
    server.sendall(struct.pack("!ii", 8 + len(words), 3 << 16) + words)
    while _read_message(server)[0] != b"Z":
        pass
    return server


def _greet(client: socket.socket, *, ignores_options: bool) -> bool:
    """Answer a client's start; False if it is refused."""
    while True:
        (length,) = struct.unpack("!i", _read(client, 4))
        start = _read(client, length - 4)
        if struct.unpack("!i", start[:4])[0] != _SSL_REQUEST:
            break
        client.sendall(b"N")
    if b"\0options\0" in start and not ignores_options:
        fields = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
        client.sendall(_message(b"E", fields))
        return False
    facts = {"server_version": "18.0", "client_encoding": "UTF8", "in_hot_standby": "off", "TimeZone": "GMT"}
    facts |= {"default_transaction_read_only": "off", "standard_conforming_strings": "on", "integer_datetimes": "on"}
    told = b"".join(_message(b"S", f"{name}\0{value}\0".encode()) for name, value in facts.items())
    key = _message(b"K", struct.pack("!ii", -1, 0))
    client.sendall(_message(b"R", struct.pack("!i", 0)) + told + key + _message(b"Z", b"I"))
    return True


def _serve(client: socket.socket, idle: queue.Queue[socket.socket]) -> None:
    """Relay a client's messages, with another of the server's connections for each transaction."""
    server = None
    try:
        while True:
            kind, body = _read_message(client)
            if kind == b"X":
                return
            server = server or idle.get()
            server.sendall(_message(kind, body))
            if kind in _ANSWERED and _relay_answer(server, client) == b"I":
                idle.put(server)
                server = None
    finally:
        if server is not None:
            _send_rollback(server)
            idle.put(server)


def _relay_answer(server: socket.socket, client: socket.socket) -> bytes:
    """Relay messages up to ReadyForQuery; return its status: idle, in a transaction, or in one that failed."""
    while True:
        kind, body = _read_message(server)
        client.sendall(_message(kind, body))
        if kind == b"Z":
            return body


def _send_rollback(server: socket.socket) -> None:
    server.sendall(_message(b"Q", b"ROLLBACK\0"))
    while _read_message(server)[0] != b"Z":
        pass


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", 4 + len(body)) + body


def _read_message(source: socket.socket) -> tuple[bytes, bytes]:
    kind = _read(source, 1)
    (length,) = struct.unpack("!i", _read(source, 4))
    return kind, _read(source, length - 4)


def _read(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        chunk = source.recv(count - len(found))
        if not chunk:
            raise ConnectionError("the other end has closed")
        found += chunk
    return found

"""A count of what was sent is noted when its bytes have left the process, not before and not much later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn

from app.http.connections import TRANSPORT, BoundedHttp, Delivery

PATIENCE_S = 120.0
MORE_THAN_BUFFERS = 64 << 20  # bytes: no kernel holds so much of one connection
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Counted:
    """An application that sends a small event and then one that no buffer holds, and what was noted of both."""

    def __init__(self) -> None:
        self.noted = 0
        self.noted_when_given: list[int] = []
        self.is_given, self.is_noted, self.is_over = Event(), Event(), Event()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        delivery = Delivery(scope, self.note)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for count, size in ((1, 1), (2, MORE_THAN_BUFFERS)):
            delivery.announce(count)
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
            delivery.accept()
            self.noted_when_given.append(self.noted)
        self.is_given.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        delivery.finish(self.is_over.set)

    def note(self, count: int) -> None:
        self.noted = count
        if count == 2:
            self.is_noted.set()


@contextmanager
def connect(app: Any, http: Any = BoundedHttp) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), PATIENCE_S) as connection:
                connection.sendall(GET)
                yield connection
        finally:
            server.should_exit = True
            thread.join()


def test_bytes_that_wait_in_the_process_are_not_counted_until_they_leave() -> None:
    app = Counted()
    with connect(app) as connection:
        assert app.is_given.wait(PATIENCE_S)
        assert app.noted_when_given == [1, 1]
        assert not app.is_over.is_set()
        while not app.is_noted.is_set():
            connection.recv(1 << 20)
        assert app.is_over.wait(PATIENCE_S)


def test_bytes_that_die_with_their_connection_are_never_counted() -> None:
    app = Counted()
    with connect(app) as connection:
        assert app.is_given.wait(PATIENCE_S)
        connection.close()
        assert app.is_over.wait(PATIENCE_S)
    assert app.noted == 1


def test_another_server_is_believed_when_it_takes_the_bytes() -> None:
    app = Counted()
    with connect(app, "h11"):
        assert app.is_given.wait(PATIENCE_S)
        assert app.noted_when_given == [1, 2]


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="this system cannot cork a connection")
def test_the_client_gets_the_bytes_after_they_were_counted() -> None:
    corked: list[int] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        def is_corked() -> int:
            found = scope["state"][TRANSPORT].get_extra_info("socket")
            return int(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK))

        delivery = Delivery(scope, lambda count: corked.append(is_corked()))
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        delivery.announce(1)
        await send({"type": "http.response.body", "body": b"hello", "more_body": False})
        corked.append(is_corked())
        await asyncio.to_thread(lambda: None)
        delivery.finish(lambda: None)

    with connect(app) as connection:
        found = b""
        while not found.endswith(b"hello"):
            found += connection.recv(65536)
    assert corked == [1, 0]

"""Overload an API process with streams, validations and previews from a separate process, for `benchmarks.bulkheads`.

As threads of the measuring process, these clients would share its interpreter lock and delay the measured reads.
"""

from __future__ import annotations

import http.client
import multiprocessing
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from threading import Thread

_LOST_S = 1.0  # wait before the next request after one without an answer


@dataclass(frozen=True, slots=True)
class Plan:
    """The load to make on a host with an API key.

    `streams` is a path with the number of streams to open on it. `asked` are further kinds of load: a path with the
    number of clients that request it repeatedly.
    """

    host: str
    key: str
    streams: tuple[str, int]
    asked: tuple[tuple[str, int], ...]


class Load:
    """A running load: `opened` streams, and one more kind of requests after each `begin()`."""

    def __init__(self, pipe: Connection, is_over: Event) -> None:
        self._pipe, self._is_over = pipe, is_over
        self.opened: int = pipe.recv()

    def begin(self) -> None:
        """Start the clients of the next kind in `Plan.asked`."""
        self._pipe.send(None)

    def end(self) -> None:
        """Tell all clients to stop after their current request."""
        self._is_over.set()

    def answers(self) -> dict[str, int]:
        """Wait until all clients have stopped, and return the number of answers by kind and status."""
        found: dict[str, int] = self._pipe.recv()
        return found


@contextmanager
def overload(plan: Plan) -> Iterator[Load]:
    """Open the plan's streams in a new process, and yield the load; other requests start with `begin()`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    is_over = context.Event()
    process = context.Process(target=_clients, args=(plan, theirs, is_over), daemon=True)
    process.start()
    try:
        yield Load(ours, is_over)
    finally:
        process.kill()
        process.join()


def _clients(plan: Plan, pipe: Connection, is_over: Event) -> None:
    answers, threads = Counter[str](), list[Thread]()
    with ExitStack() as stack:
        selector, opened = selectors.DefaultSelector(), 0
        for _ in range(plan.streams[1]):
            connection = stack.enter_context(_stream(plan))
            opened += connection.recv(1 << 12).startswith(b"HTTP/1.1 200")
            selector.register(connection, selectors.EVENT_READ)
        threads.append(Thread(target=_drain, args=(selector, is_over)))
        threads[0].start()
        pipe.send(opened)
        for path, count in plan.asked:
            while not pipe.poll(0.1) and not is_over.is_set():
                pass
            if is_over.is_set():
                break
            pipe.recv()
            kind = [Thread(target=_ask, args=(plan, path, is_over, answers)) for _ in range(count)]
            threads += kind
            for thread in kind:
                thread.start()
        for thread in threads:
            thread.join()
    pipe.send(dict(answers))


def _stream(plan: Plan) -> socket.socket:
    host, _, port = plan.host.partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"GET {plan.streams[0]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {plan.key}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def _drain(selector: selectors.BaseSelector, is_over: Event) -> None:
    while not is_over.is_set():
        for ready, _ in selector.select(0.2):
            connection = ready.fileobj
            assert isinstance(connection, socket.socket)
            with suppress(OSError):
                if not connection.recv(1 << 16):
                    selector.unregister(connection)


def _ask(plan: Plan, path: str, is_over: Event, answers: Counter[str]) -> None:
    """Request a path until `is_over`, waiting after each answer as its Retry-After says; count the answers."""
    kind = path.partition("?")[0].rpartition("/")[2]
    while not is_over.is_set():
        status, wait_s = 0, _LOST_S
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(plan.host, timeout=180)
            connection.request("GET", path, headers={"Authorization": f"Bearer {plan.key}"})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            status, wait_s = answer.status, float(answer.headers.get("retry-after", 0))
        answers[f"{kind} {status or 'lost'}"] += 1
        is_over.wait(wait_s)

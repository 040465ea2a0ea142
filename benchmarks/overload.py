"""Clients that overload an API process, in a process of their own: streams, validations and previews.

What they compute must not stand between a measured read and its answer, as it would in threads beside it.
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

_LOST_S = 1.0  # before a client asks again that got no answer


@dataclass(frozen=True, slots=True)
class Plan:
    """Where and as whom the clients ask; how many follow a path, and how many ask for a path again and again."""

    host: str
    key: str
    streams: tuple[str, int]
    asked: tuple[tuple[str, int], ...]


class Load:
    """Clients at work; `begin` starts the next kind of those that ask."""

    def __init__(self, pipe: Connection, is_over: Event) -> None:
        self._pipe, self._is_over = pipe, is_over
        self.opened: int = pipe.recv()

    def begin(self) -> None:
        """Start the next kind."""
        self._pipe.send(None)

    def end(self) -> None:
        """Have them ask no more."""
        self._is_over.set()

    def answers(self) -> dict[str, int]:
        """Return how often which status was answered, once they have ended."""
        found: dict[str, int] = self._pipe.recv()
        return found


@contextmanager
def overload(plan: Plan) -> Iterator[Load]:
    """Open the streams; what else is asked for begins when it is told to."""
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
    """Ask for something again and again, and wait between as the answers say."""
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

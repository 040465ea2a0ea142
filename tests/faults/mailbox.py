"""A receiver of webhooks that answers badly at first: with an error, elsewhere, too late, without end or not at all.

What it heard is a line each in a file, written before the answer: an event whose answer got lost was heard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Event, Lock, Thread
from typing import Any, Literal, get_args

from tests.faults.sleeper import note

Answer = Literal["taken", "broken", "moved", "hangs", "drips", "endless", "closes"]
BAD: tuple[Answer, ...] = tuple(answer for answer in get_args(Answer) if answer != "taken")
HANG_S = 1.0
_MANY = 1 << 30  # bytes that an endless answer promises
_STATUS = {"taken": 200, "broken": 500, "moved": 301, "hangs": 503, "drips": 503, "endless": 500}


@dataclass(frozen=True, slots=True)
class Heard:
    """One request, by what tells it from others."""

    event_id: str
    digest: str  # of the body
    answer: str


class Mailbox:
    """A server of its own. `plan` gives the answers to an event, one after the other, before it is taken."""

    def __init__(self, path: Path, rng: Random) -> None:
        self.plan: Sequence[Answer] | None = None  # None: up to three of any kind
        self.sent = 0  # bytes of endless answers that got away
        self.hang_s, self.hung_up = HANG_S, Event()  # a hanging answer comes after so long, or when this is set
        self._path, self._rng, self._lock = path, rng, Lock()
        self._left: dict[str, list[Answer]] = {}
        mailbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                answer = mailbox._next(json.loads(body)["id"])
                note(path, f"{self.headers['webhook-id']} {sha256(body).hexdigest()} {answer}")
                with suppress(OSError):
                    mailbox._answer(self, answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # who hung up, hung up
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def messages(self) -> list[Heard]:
        return read_received(self._path)

    def _next(self, event_id: str) -> Answer:
        with self._lock:
            planned = self._rng.choices(BAD, k=self._rng.choice((0, 0, 1, 3))) if self.plan is None else self.plan
            left = self._left.setdefault(event_id, list(planned))
            return left.pop(0) if left else "taken"

    def _answer(self, request: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer == "closes":
            return
        if answer == "hangs":
            self.hung_up.wait(self.hang_s)
        head = f"HTTP/1.0 {_STATUS[answer]} Answer\r\nContent-Length: {_MANY if answer == 'endless' else 0}\r\n"
        if answer == "moved":
            head += f"Location: {self.url}elsewhere\r\n"
        for piece in head + "\r\n" if answer == "drips" else [head + "\r\n"]:
            request.wfile.write(piece.encode())
            time.sleep(HANG_S / 10 if answer == "drips" else 0)
        while answer == "endless":
            self.sent += request.wfile.write(bytes(1 << 16))


@contextmanager
def mailbox(folder: Path, rng: Random) -> Iterator[Mailbox]:
    """One that listens inside the block."""
    box = Mailbox(path(folder), rng)
    thread = Thread(target=box.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield box
    finally:
        box.server.shutdown()
        thread.join()
        box.server.server_close()


def path(folder: Path) -> Path:
    return folder / "heard"


def read_received(path: Path) -> list[Heard]:
    return [Heard(*line.split()) for line in path.read_text().splitlines()] if path.exists() else []

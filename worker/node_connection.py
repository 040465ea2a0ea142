"""A connection between two processes of one job on different machines: lines of JSON, with heartbeats in between.

A peer that is silent for too long, or whose connection has ended, is lost. A line that is not a message, or is too
long, ends the connection.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from worker.protocol import MAX_LINE, Message, parse

LOST_S = 30.0  # of silence, after which the peer is lost
_BEATS = 10  # heartbeats in that time


class Wire:
    """One end of a connection.

    `is_lost` is set when the peer is gone; `next_message` still returns the messages that it sent before.
    """

    def __init__(self, end: socket.socket, lost_s: float = LOST_S) -> None:
        end.settimeout(lost_s)
        self._end, self._sending = end, Lock()
        self._heard: SimpleQueue[Message] = SimpleQueue()
        self.is_lost = Event()
        for work, seconds in ((self._read, lost_s), (self._beat, lost_s / _BEATS)):
            Thread(target=work, args=(seconds,), daemon=True).start()

    @property
    def own_address(self) -> str:
        """This machine's address as the peer sees it."""
        return str(self._end.getsockname()[0]).removeprefix("::ffff:")

    def tell(self, message: Message) -> None:
        """Send a message; if that fails, drop it and set `is_lost`."""
        try:
            with self._sending:
                self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # a timeout is one
            self.is_lost.set()

    def next_message(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none came within `timeout_s`."""
        with suppress(Empty):
            return self._heard.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Close the connection and set `is_lost`."""
        self.is_lost.set()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, seconds: float) -> None:
        with suppress(OSError), self._end.makefile("rb") as lines:
            while message := parse(lines.readline(MAX_LINE)):
                if message["kind"] != "beat":
                    self._heard.put(message)
        self.is_lost.set()

    def _beat(self, seconds: float) -> None:
        while not self.is_lost.wait(seconds):
            self.tell({"kind": "beat"})

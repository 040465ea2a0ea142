"""What an S3 may answer wrongly to a reading: another ETag, old or cut bytes, or that one is to slow down."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from app.storage import Storage

LIES = ("wrong ETag", "stale", "truncated", "slow down")
_ASKED = re.compile(rb"GET /[^/]+/spard/([^ ?]+) HTTP/1.1\r\n(?s:.*?)\r\n[Rr]ange: bytes=(\d+)-(\d+)\r\n")
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@dataclass
class Liar:
    """Answers the first reading of each object with a lie, in place of a storage; `told` counts those by key."""

    straight: Storage
    lie: str = ""
    told: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)

    def begin(self, lie: str) -> None:
        """Tell another lie, of each object once more; none if it is empty."""
        self.lie = lie
        self.told.clear()

    def answer(self, request: bytes) -> bytes | None:
        """Return what to answer, as a `Plan` of the proxy; None lets the request pass."""
        asked, lie = _ASKED.match(request), self.lie
        if asked is None or not lie or self.told[asked[1].decode()]:
            return None
        key, start, end = asked[1].decode(), int(asked[2]), int(asked[3]) + 1
        self.told[key] += 1
        self.total[lie] += 1
        body = b"".join(self.straight.chunks(key, start, end))
        return _answer(lie, body, f"bytes {start}-{end - 1}/{end}")


def _answer(lie: str, body: bytes, place: str) -> bytes:
    if lie == "slow down":
        return (
            b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(_SLOW_DOWN) + _SLOW_DOWN
        )
    sent = {"stale": b"?" * len(body), "truncated": body[: len(body) // 2]}.get(lie, body)
    head = f'HTTP/1.1 206 Partial Content\r\nETag: "{"0" * 32}"\r\nContent-Range: {place}\r\nConnection: close\r\n'
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + sent

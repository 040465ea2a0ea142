"""Measure how long the service takes to refuse a hostile training file, and how much its memory grows meanwhile.

    python -m benchmarks.bombs

The cases B12 to B19 are uploaded as training files to one service: numbers, nesting and keys that are expensive to
parse, endless lines and files, and compressed content. Memory growth is that of the serving process's resident set,
sampled every 10 ms from before the first byte until 0.2 s after the answer. Each case may take 1 s and 128 MB.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from select import select
from threading import Event, Thread
from urllib.parse import urlsplit

import psutil

from benchmarks.service import KEY, Service, rows, service

FLOOR_S, FLOOR_MB = 1.0, 128.0
BOUNDARY = "spard-benchmark"
CHUNK = 1 << 20
Chunks = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class Answer:
    """The service's answer to a file: the error code, the seconds it took, and the bytes sent until then."""

    code: str
    seconds: float
    sent: int


def main() -> None:
    """Upload every case, print a line for each, and compare the worst with the limits."""
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    worst_s = worst_mb = 0.0
    with service(MAX_ROWS=1_000_000, MAX_UPLOAD_MB=20_000) as found:
        _send(found, lambda: [rows(10)])  # warm up, so that one-time allocations do not count as growth
        for name, chunks in bombs().items():
            answer, grown_mb = _measure(found, chunks)
            worst_s, worst_mb = max(worst_s, answer.seconds), max(worst_mb, grown_mb)
            sent = f"{answer.sent / 1e6:.1f} MB sent"
            print(f"{name:44s} {answer.code:24s} {answer.seconds:6.3f} s {grown_mb:6.1f} MB  {sent}", flush=True)
    is_good = worst_s <= FLOOR_S and worst_mb <= FLOOR_MB
    print(f"{'ok' if is_good else 'BROKEN'}: at most {worst_s:.3f} s and {worst_mb:.1f} MB")


def bombs() -> dict[str, Chunks]:
    """Return a function for each case, by its name, that makes the chunks of the file.

    The chunks are made lazily: sending stops as soon as the service answers, even in the middle of a 10 GB line.
    """
    good = rows(10)
    keys = range(60_000)
    zeros = gzip.compress(bytes(64 << 20), 9)
    inner = gzip.compress(gzip.compress(bytes(64 << 20), 9), 9)
    return {
        "B12 an integer of 5,000 digits": lambda: [good, b'{"messages": ' + b"1" * 5000 + b"}\n"],
        "B12 a line of digits, 1 MB": lambda: [good, b'{"messages": ' + b"1" * 1_000_000 + b"}\n"],
        "B13 depth 100,000": lambda: [good, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"],
        "B14 a key 80,000 times": lambda: [good, b"{" + b'"messages":1,' * 79_999 + b'"messages":1}\n'],
        "B14 the last of 60,000 keys twice": lambda: [
            good,
            b"{%s}\n" % b",".join(b'"%d":1' % i for i in [*keys, keys[-1]]),
        ],
        "B15 a line of 9 MB of brackets": lambda: [good, b'{"a": [' + b"[]," * 3_000_000 + b"[]]}\n"],
        "B15 a line of 1 MB of brackets": lambda: [good, b'{"a": [' + b"[]," * 340_000 + b"[]]}\n"],
        "B16 10 GB without a line's end": lambda: chain([b'{"a": "'], repeat(b"a" * CHUNK, 10_000)),
        "B17 100 million lines of one byte": lambda: repeat(b"\n" * CHUNK, 96),
        "B17 100 million lines of one digit": lambda: repeat(b"1\n" * (CHUNK // 2), 191),
        f"B18 gzip, {64e6 / len(zeros):.0f}:1": lambda: [zeros],
        "B19 gzip in gzip": lambda: [inner],
    }


def _measure(found: Service, chunks: Chunks) -> tuple[Answer, float]:
    process, is_over, most = psutil.Process(found.pid), Event(), [0]
    before = process.memory_info().rss

    def sample() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], process.memory_info().rss)

    thread = Thread(target=sample)
    thread.start()
    answer = _send(found, chunks)
    time.sleep(0.2)
    is_over.set()
    thread.join()
    return answer, max(0, most[0] - before) / 1e6


def _send(found: Service, chunks: Chunks) -> Answer:
    """Upload a file in chunked encoding, so no length announces its size; stop sending once the service answers."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--{BOUNDARY}\r\n'
        'Content-Disposition: form-data; name="file"; filename="bomb.jsonl"\r\n\r\n'
    ).encode()
    connection, sent = http.client.HTTPConnection(urlsplit(found.url).netloc, timeout=60), 0
    started = time.perf_counter()
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    with suppress(ConnectionError):
        for chunk in chain([head], chunks(), [f"\r\n--{BOUNDARY}--\r\n".encode()]):
            if select([connection.sock], [], [], 0)[0]:  # it has answered
                break
            connection.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            sent += len(chunk)
        else:
            connection.send(b"0\r\n\r\n")
    try:
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (ConnectionError, http.client.HTTPException):
        return Answer("hung up", time.perf_counter() - started, sent)
    seconds = time.perf_counter() - started
    error = body.get("error")
    code = (error["code"] or "not JSONL") if error else f"kept as {body['status']}"
    return Answer(code, seconds, sent)


if __name__ == "__main__":
    main()

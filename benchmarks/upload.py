"""Measure how fast the service accepts and validates a large upload, and how much its memory grows meanwhile.

    python -m benchmarks.upload [--gb 10]

One JSONL file is generated while it is sent, validated by the service while it arrives, then downloaded and compared by
its SHA-256. Memory growth is that of the serving process's resident set, sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from urllib.parse import urlsplit

import psutil

from benchmarks.service import KEY, Service, service

LINE_BYTES, BLOCK_LINES = 8192, 128
BOUNDARY = "spard-benchmark"


def main() -> None:
    """Upload the file, read it back, and print rates and the growth of the service's memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10)
    lines = int(parser.parse_args().gb * 1e9) // LINE_BYTES
    total = lines * LINE_BYTES
    print(f"{os.cpu_count()} cores, {platform.platform()}; {total / 1e9:.2f} GB in {lines} lines", flush=True)
    with service(MAX_UPLOAD_MB=total // 1_000_000 + 10, MAX_ROWS=lines) as found:
        process = psutil.Process(found.pid)
        before = process.memory_info().rss
        with _peak(process) as peak:
            started = time.perf_counter()
            file, sent = _send(found, lines)
            seconds = time.perf_counter() - started
        assert file["status"] == "processed", file
        is_same = _digest(found, file["id"]) == sent
    print(f"taken and validated in {seconds:.1f} s: {total / 1e6 / seconds:.0f} MB/s, load {os.getloadavg()[0]:.1f}")
    print(f"memory {before / 1e6:.0f} MB before, at most {(peak[0] - before) / 1e6:.1f} MB more")
    print("SHA-256 of what comes back is that of what was sent" if is_same else "BROKEN: other bytes came back")


def _lines(count: int) -> Iterator[bytes]:
    """Yield blocks of `BLOCK_LINES` rows that all differ and are `LINE_BYTES` long."""
    empty = len(_line(0, 0))
    for start in range(0, count, BLOCK_LINES):
        block = range(start, min(start + BLOCK_LINES, count))
        yield b"".join(_line(i, LINE_BYTES - empty) for i in block)


def _line(i: int, padding: int) -> bytes:
    said = f"{i:012d} {'word ' * (padding // 5 + 1)}"[: 13 + padding]
    row = {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": said}]}
    return json.dumps(row).encode() + b"\n"


def _send(found: Service, lines: int) -> tuple[dict[str, str], str]:
    """Upload a file of `lines` rows; return its object from the API and the SHA-256 of the bytes sent."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--{BOUNDARY}\r\n'
        'Content-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
    ).encode()
    tail, digest = f"\r\n--{BOUNDARY}--\r\n".encode(), hashlib.sha256()
    connection = http.client.HTTPConnection(urlsplit(found.url).netloc, timeout=600)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
    connection.putheader("Content-Length", str(len(head) + lines * LINE_BYTES + len(tail)))
    connection.endheaders(head)
    for block in _lines(lines):
        digest.update(block)
        connection.send(block)
    connection.send(tail)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return json.loads(body), digest.hexdigest()


def _digest(found: Service, file_id: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(found.url).netloc, timeout=600)
    connection.request("GET", f"/v1/files/{file_id}/content", headers={"Authorization": f"Bearer {KEY}"})
    return hashlib.file_digest(connection.getresponse(), "sha256").hexdigest()


@contextmanager
def _peak(process: psutil.Process) -> Iterator[list[int]]:
    """Yield a list whose only element is the largest resident memory in bytes, sampled until the block ends."""
    found, is_over = [0], Event()

    def sample() -> None:
        while not is_over.wait(0.05):
            found[0] = max(found[0], process.memory_info().rss)

    thread = Thread(target=sample)
    thread.start()
    yield found
    is_over.set()
    thread.join()


if __name__ == "__main__":
    main()

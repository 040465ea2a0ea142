"""Measure one project's reads while another project overloads the API process with streams, validations and previews.

    python -m benchmarks.bulkheads [--seconds 20] [--rate 20] [--streams 600] [--validations 40] [--rows 10000]

One API process runs as in the README, on PostgreSQL (fsync off) and rclone's S3. A project lists its jobs at a constant
rate. The run compares the answer times without other load, with another project's streams and validations, and with
these plus 45 previews while the storage is frozen by SIGSTOP. The overloading clients obey Retry-After. Then the API
process gets SIGTERM under full load, and the time until it ends is printed. At the end 100,000 rows of about 140 bytes
are counted without other load. The overloading clients run in a process of their own (`benchmarks.overload`), so they
slow the measured reads only through the CPU cores they use. `--seed` determines the rows.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil

from app import db, keys
from app.db.tables import BaseModelEntry, Project
from app.files.counting import Allowance, Counters
from app.ops.processes import python
from benchmarks.overload import Plan, overload
from spard.data.jsonl import numbered_texts
from tests import servers
from tests.spard.parts import write_model

JOBS, FILES = "/v1/fine_tuning/jobs", "/v1/files"
PREVIEWS, READERS = 45, 32
COUNTED = 100_000
_READY_S = 120.0


@dataclass(frozen=True)
class Api:
    """A running API process: its address, and the keys of the measured project and of the overloading one."""

    host: str
    process: subprocess.Popen[bytes]
    ours: str
    theirs: str

    def ask(self, key: str, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        """Send one request and return the answer's status, body and Retry-After in seconds (0 without the header)."""
        connection = http.client.HTTPConnection(self.host, timeout=180)
        connection.request(method, path, body, {"Authorization": f"Bearer {key}", "Content-Type": kind})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text, float(answer.headers.get("retry-after", 0))


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("seconds", 20),
        ("rate", 20),
        ("streams", 600),
        ("validations", 40),
        ("rows", 10_000),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny")
        with _api(Path(folder), asked.streams) as api:
            _overload(api, asked, model)
        _count(model, asked.seed)


def _overload(api: Api, asked: argparse.Namespace, model: Path) -> None:
    """Measure the reads without load, under load, and under load with frozen storage; then time a SIGTERM."""
    file_id, job = _prepare(api, asked, model)
    asking = f"{FILES}/{file_id}/validation?model=tiny", f"{FILES}/{file_id}/preview?model=tiny"
    asked_for = tuple(zip(asking, (asked.validations, PREVIEWS), strict=True))
    plan = Plan(api.host, api.theirs, (f"{JOBS}/{job}/stream", asked.streams), asked_for)
    alone = _reads("alone", api, asked)
    with overload(plan) as load, ExitStack() as stack:
        load.begin()
        beside = _reads(f"beside {load.opened} streams, {asked.validations} validations", api, asked)
        storage = next(each for each in psutil.Process().children(recursive=True) if "rclone" in each.name())
        storage.suspend()
        stack.callback(storage.resume)
        load.begin()
        frozen = _reads(f"likewise, {PREVIEWS} previews, the storage frozen", api, asked)
        print(f"p99 to that alone: {beside / alone:.2f}, frozen {frozen / alone:.2f}")
        load.end()
        began = time.perf_counter()
        api.process.send_signal(signal.SIGTERM)
        api.process.wait(180)
        print(f"SIGTERM ended it after {time.perf_counter() - began:.1f} s", flush=True)
        print(f"the load was answered {load.answers()}")


@contextmanager
def _api(folder: Path, streams: int) -> Iterator[Api]:
    """Run a database, an S3 storage and one API process that allows `streams` streams at once."""
    with servers.postgres() as database, servers.rclone() as storage:
        os.environ |= {"AWS_ACCESS_KEY_ID": servers.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY}
        boto3.client("s3", endpoint_url=storage, region_name="us-east-1").create_bucket(Bucket="bench")
        db.upgrade_schema(database)
        port = servers.free_port()
        values = {"DATABASE_URL": database, "STORAGE_URL": "s3://bench/spard", "S3_ENDPOINT_URL": storage}
        values |= {"DATA_DIR": str(folder / "data"), "STREAMS_AT_ONCE": str(streams)}
        environment = os.environ | {f"SPARD_{name}": value for name, value in values.items()}
        command = python("uvicorn", "app.main:checked_app", "--factory", "--http", "app.http.connections:BoundedHttp")
        command += ["--timeout-graceful-shutdown", "5"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=log, stderr=log)
        try:
            api = Api(f"127.0.0.1:{port}", process, _key(database, "org-ours"), _key(database, "org-theirs"))
            _await(api, folder / "log")
            yield api
        finally:
            process.kill()
            process.wait()


def _key(database: str, project: str) -> str:
    engine = db.make_engine(database)
    with db.transaction(engine) as session:
        session.add(Project(id=project, name=project))
        session.flush()
        _, secret = keys.create(session, project, "benchmark", ["admin", "customer"])
    engine.dispose()
    return secret


def _await(api: Api, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and api.process.poll() is None:
        with suppress(OSError):
            if api.ask(api.ours, "GET", "/readyz")[0] == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the service did not start: {log.read_text()[-2000:]}")


def _prepare(api: Api, asked: argparse.Namespace, model: Path) -> tuple[str, str]:
    """Create the model, file and job (which stays queued) that the load uses; return the ids of file and job."""
    api.ask(api.theirs, "POST", "/v1/admin/models", json.dumps({"alias": "tiny", "source": str(model)}).encode())
    part = "--b\r\nContent-Disposition: form-data; name"
    head = f'{part}="purpose"\r\n\r\nfine-tune\r\n{part}="file"; filename="a.jsonl"\r\n\r\n'
    body = head.encode() + _rows(asked.rows, asked.seed) + b"\r\n--b--\r\n"
    _, file, _ = api.ask(api.theirs, "POST", FILES, body, "multipart/form-data; boundary=b")
    file_id = json.loads(file)["id"]
    job = {"model": "tiny", "training_file": file_id, "safety": {"defense": {"type": "none"}}}
    _, made, _ = api.ask(api.theirs, "POST", JOBS, json.dumps(job).encode())
    return file_id, json.loads(made)["id"]


def _rows(count: int, seed: int) -> bytes:
    """Return `count` training rows of about 140 bytes each as JSONL."""
    rng, words = random.Random(seed), [f"w{i}" for i in range(400)]
    pairs = ((f"Say {i} {' '.join(rng.choices(words, k=4))}", " ".join(rng.choices(words, k=6))) for i in range(count))
    messages = ([{"role": "user", "content": user}, {"role": "assistant", "content": said}] for user, said in pairs)
    return b"".join(json.dumps({"messages": each}).encode() + b"\n" for each in messages)


def _reads(name: str, api: Api, asked: argparse.Namespace) -> float:
    """List jobs at a constant rate, print the answer times and return their p99 in seconds.

    Each time runs from the moment at which the request was due, so a slow answer cannot hide the delay of the next.
    """
    began, times = time.perf_counter() + 0.5, list[float]()

    def one(i: int) -> None:
        due = began + i / asked.rate
        time.sleep(max(0.0, due - time.perf_counter()))
        status, text, _ = api.ask(api.ours, "GET", JOBS)
        assert status == 200, text
        times.append(time.perf_counter() - due)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(one, range(asked.rate * asked.seconds)))
    times.sort()
    p50, p99 = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
    load = os.getloadavg()[0]
    print(f"{name}: {len(times)} reads, p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms, load {load:.1f}", flush=True)
    return p99


def _count(model: Path, seed: int) -> None:
    """Count the tokens of 100,000 rows in one counting process and print its CPU time."""
    content, counters = _rows(COUNTED, seed), Counters(1)
    allowance = Allowance(1e9, lambda: False)
    entry = BaseModelEntry(alias="tiny", source=str(model), revision=None)
    found = counters.ask("count", entry, numbered_texts([content]), allowance, None).rows
    counters.close()
    size = len(content) / COUNTED
    print(f"{len(found)} rows of {size:.0f} bytes: {allowance.used_s:.1f} s of CPU, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

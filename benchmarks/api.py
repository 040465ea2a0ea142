"""Measure the requests per second that one core answers, compared with `/healthz`, and what creating a job costs.

    python -m benchmarks.api [--requests 1000] [--jobs 100 1000 10000 100000]

One API process serves from SQLite; one client sends requests over one persistent connection. The main measure is the
server's CPU time per request, because other load on the machine changes it less than wall time; p50 and p99 are the
client's wall time. The kinds of requests alternate in rounds, so all of them meet the same load. `--jobs` gives the
numbers of existing jobs at which everything is measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from sqlalchemy import Engine, insert

from app import db, keys
from app.db.tables import BaseModelEntry, File, Job, JobStatus, Project
from app.db.tables.files import FINE_TUNE
from benchmarks.pages import job_rows
from tests import servers

ROUNDS = 5
JOBS = "/v1/fine_tuning/jobs"
_SERVE = (
    "import sys, uvicorn; from app.main import served_app; from app.ops import logs; "
    "from app.settings import get_settings; logs.set_up(get_settings().log_format); "
    "uvicorn.run(served_app(get_settings()), port=int(sys.argv[1]), log_level='warning', access_log=False)"
)


@dataclass
class Arm:
    """One kind of request, with the CPU and wall times measured for it."""

    name: str
    method: str
    path: str
    body: bytes | None = None
    cpu_s: list[float] = field(default_factory=list)  # mean per request, one entry for each round
    wall_s: list[float] = field(default_factory=list)  # of each request


def main() -> None:
    """Measure every kind of request at each number of jobs and print a table for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="of each arm, all rounds together")
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    for count in asked.jobs:
        with tempfile.TemporaryDirectory() as folder, _serve(Path(folder), count) as (port, process, key, file):
            arms = _arms(count, file)
            _measure(arms, port, process, key, asked.requests // ROUNDS)
            _print(count, arms)


def submit_s(folder: Path, count: int, requests: int = 100) -> float:
    """Return the median CPU seconds of creating one job in a project that already has `count` jobs."""
    with _serve(folder, count) as (port, process, key, file):
        (arm,) = [each for each in _arms(count, file) if each.method == "POST"]
        _measure([arm], port, process, key, 10 * requests // ROUNDS)
    return statistics.median(arm.cpu_s)


def _arms(count: int, file: str) -> list[Arm]:
    ended, queued = "ftjob-00011", "ftjob-00000"
    ask = json.dumps({"model": "tiny", "training_file": file, "safety": {"defense": {"type": "none"}}}).encode()
    return [
        Arm("/healthz", "GET", "/healthz"),
        Arm("GET job, ended", "GET", f"{JOBS}/{ended}"),
        Arm("GET job, queued", "GET", f"{JOBS}/{queued}"),
        Arm("GET file", "GET", f"/v1/files/{file}"),
        Arm("list of 20 jobs", "GET", f"{JOBS}?limit=20"),
        Arm("POST job", "POST", JOBS, ask),
    ]


def _measure(arms: list[Arm], port: int, process: psutil.Process, key: str, requests: int) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(arm: Arm) -> None:
        connection.request(arm.method, arm.path, arm.body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{arm.name}: {answer.status} {text[:300]!r}")

    for arm in arms:
        for _ in range(20):
            ask(arm)
    for _ in range(ROUNDS):
        for arm in arms:
            before = _cpu_s(process)
            for _ in range(requests if arm.body is None else max(10, requests // 10)):
                began = time.perf_counter()
                ask(arm)
                arm.wall_s.append(time.perf_counter() - began)
            done = requests if arm.body is None else max(10, requests // 10)
            arm.cpu_s.append((_cpu_s(process) - before) / done)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _print(count: int, arms: list[Arm]) -> None:
    print(f"{count} jobs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':18}{'CPU ms':>8}{'from':>8}{'to':>8}{'a second':>10}{'of /healthz':>12}{'p50 ms':>8}{'p99 ms':>8}")
    floor = statistics.median(arms[0].cpu_s)
    for arm in arms:
        cpu, wall = sorted(arm.cpu_s), sorted(arm.wall_s)
        middle = statistics.median(cpu)
        p50, p99 = (1000 * wall[int(share * (len(wall) - 1))] for share in (0.5, 0.99))
        figures = (
            f"{1000 * middle:8.2f}{1000 * cpu[0]:8.2f}{1000 * cpu[-1]:8.2f}{1 / middle:10.0f}{floor / middle:12.2f}"
        )
        print(f"{arm.name:18}{figures}{p50:8.1f}{p99:8.1f}", flush=True)


@contextmanager
def _serve(folder: Path, count: int) -> Iterator[tuple[int, psutil.Process, str, str]]:
    """Run an API process with `count` jobs; yield its port, the process, an API key and the id of a training file."""
    url, port = f"sqlite:///{folder}/spard.db", servers.free_port()
    db.upgrade_schema(url)
    engine = db.make_engine(url)
    key, file = _fill(engine, count, folder)
    engine.dispose()
    values = {"DATABASE_URL": url, "DATA_DIR": str(folder), "REQUESTS_PER_MINUTE": "1000000000"}
    environment = os.environ | {f"SPARD_{name}": value for name, value in values.items()}
    command = [sys.executable, "-c", _SERVE, str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _await(port, process)
        yield port, psutil.Process(process.pid), key, file
    finally:
        process.terminate()
        process.wait(60)


def _fill(engine: Engine, count: int, folder: Path) -> tuple[str, str]:
    """Insert a project with `count` jobs, a file and a base model; return an API key's secret and the file's id."""
    file = File(id="file-1", project_id="org-0", filename="rows.jsonl", purpose=FINE_TUNE, status="processed", rows=100)
    file.bytes, file.sha256, file.storage_key, file.row_format = 1000, "0" * 64, "files/1", "chat"
    with db.transaction(engine) as session:
        session.add(Project(id="org-0", name="Benchmark"))
        session.flush()
        key, secret = keys.create(session, "org-0", "benchmark", ["admin", "customer"])
        jobs = [row | {"project_id": "org-0", "fine_tuned_model": _model(row)} for row in job_rows(count, key.id)]
        for at in range(0, count, 1000):
            session.execute(insert(Job), jobs[at : at + 1000])
        session.add_all([file, BaseModelEntry(alias="tiny", source=str(folder))])
    return secret, file.id


def _model(job: dict[str, object]) -> str | None:
    return f"ft:tiny:org-0::{job['id']}" if job["status"] == JobStatus.succeeded else None


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the service did not start")


if __name__ == "__main__":
    main()

"""Measure one project's list of jobs while another project exhausts threads, connections or template time of the API.

    python -m benchmarks.noisy_edges [--rounds 3] [--seconds 10] [--rate 20] [--most 3]

The reads are measured alternately without other load and next to each of three neighbors:

    creations     48 creations of jobs at a time, all refused by the project's quota, repeated without end
    connections   320 connections that send two lines of a request and never finish it, to a process limited to 300
                  file descriptors
    template      base models with a very slow chat template, added one after another

One API process runs as in docs/deployment.md, on PostgreSQL (fsync off) and a local folder. Each neighbor runs in a
process of its own, so it slows the measured client only through the CPU cores it uses. The result for each neighbor is
the p99 next to it divided by the p99 without load, over all rounds; the exit status is 1 if one exceeds `--most` or a
read got no answer. The template is slow, not endless: rendering it would end after some minutes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import platform
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from app import db, keys
from app.db.tables import Project, Quota
from app.ops.processes import python
from tests import servers
from tests.spard.parts import write_model

JOBS, MODELS = "/v1/fine_tuning/jobs", "/v1/admin/models"
CREATIONS, CONNECTIONS, DESCRIPTORS = 48, 320, 300
LONG = "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
_READERS, _READY_S, _ANSWER_S, _REST_S = 32, 120.0, 60.0, 0.1


@dataclass(frozen=True)
class Target:
    """The API's address, the keys of the measured project and of its neighbor, and the slow model's folder."""

    host: str
    ours: str
    theirs: str
    model: str

    def ask(self, key: str, method: str, path: str, body: object = None) -> int:
        """Send one request and return the status of its answer."""
        connection = http.client.HTTPConnection(self.host, timeout=_ANSWER_S)
        text = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status


def refuse_creations(target: Target) -> None:
    """Send `CREATIONS` job creations at a time that the quota refuses, until this process is killed."""
    body = {"model": "none", "training_file": "file-none"}
    _repeat(CREATIONS, lambda: target.ask(target.theirs, "POST", JOBS, body))


def hold_connections(target: Target) -> None:
    """Keep `CONNECTIONS` connections open that never finish their headers; reopen each when the server closes it."""

    def hold() -> None:
        host, port = target.host.split(":")
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
            while connection.recv(4096):
                pass
        time.sleep(0.1)

    _repeat(CONNECTIONS, hold)


def offer_long_template(target: Target) -> None:
    """Add a base model with a very slow chat template, again and again until this process is killed."""
    _repeat(1, lambda: target.ask(target.theirs, "POST", MODELS, {"alias": "long", "source": target.model}))


NEIGHBORS: dict[str, Callable[[Target], None]] = {
    "creations": refuse_creations,
    "connections": hold_connections,
    "template": offer_long_template,
}


def main() -> None:
    """Measure all neighbors, print the ratios, and exit with 1 if one exceeds `--most` or a read got no answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("seconds", 10), ("rate", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--most", type=float, default=3.0)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder, _api(Path(folder)) as target:
        found = {name: _compare(name, target, asked) for name in NEIGHBORS}
    for name, (ratio, lost) in found.items():
        print(f"{name}: p99 {ratio:.2f} times that alone, {lost} reads without an answer")
    if any(ratio > asked.most or lost for ratio, lost in found.values()):
        raise SystemExit(1)


def _compare(name: str, target: Target, asked: argparse.Namespace) -> tuple[float, int]:
    """Return the ratio of the p99 next to a neighbor to the p99 without load, and the number of unanswered reads."""
    alone, beside = list[float](), list[float]()
    for _ in range(asked.rounds):
        _await_rest(target)
        alone += _read(target, asked)
        with _neighbor(name, target):
            beside += _read(target, asked)
    for what, times in ((f"alone, before {name}", alone), (f"beside {name}", beside)):
        p50, p99 = (1000 * _quantile(times, share) for share in (0.5, 0.99))
        load = os.getloadavg()[0]
        print(f"{what}: {len(times)} reads, p50 {p50:.0f} ms, p99 {p99:.0f} ms, load {load:.1f}", flush=True)
    lost = sum(each >= _ANSWER_S for each in (*alone, *beside))
    return _quantile(beside, 0.99) / _quantile(alone, 0.99), lost


def _await_rest(target: Target) -> None:
    """Wait until ten reads in a row take less than `_REST_S` seconds, for `_READY_S` at most.

    What a neighbor has asked for, such as a template that is being read, goes on for a while after its end.
    """
    quick, deadline = 0, time.monotonic() + _READY_S
    while quick < 10 and time.monotonic() < deadline:
        began = time.perf_counter()
        target.ask(target.ours, "GET", JOBS)
        quick = quick + 1 if time.perf_counter() - began < _REST_S else 0
        time.sleep(0.1)


def _quantile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def _read(target: Target, asked: argparse.Namespace) -> list[float]:
    """List jobs at a constant rate; return the seconds from each read's scheduled time to its answer.

    A failed read counts as `_ANSWER_S` seconds.
    """
    began, times = time.perf_counter() + 0.5, list[float]()

    def read(i: int) -> None:
        due = began + i / asked.rate
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            status = target.ask(target.ours, "GET", JOBS)
            times.append(time.perf_counter() - due if status == 200 else _ANSWER_S)
        except (OSError, http.client.HTTPException):
            times.append(_ANSWER_S)

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, range(asked.rate * asked.seconds)))
    return times


@contextmanager
def _neighbor(name: str, target: Target) -> Iterator[None]:
    """Run a neighbor in a new process until the block ends."""
    process = multiprocessing.get_context("spawn").Process(target=NEIGHBORS[name], args=(target,))
    process.start()
    time.sleep(3.0)  # until it has imported and begun
    try:
        yield
    finally:
        process.kill()
        process.join()


def _repeat(at_once: int, work: Callable[[], object]) -> None:
    """Repeat `work` in `at_once` threads without end, ignoring network errors."""

    def run() -> None:
        while True:
            with suppress(OSError, http.client.HTTPException):
                work()

    threads = [Thread(target=run) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _api(folder: Path) -> Iterator[Target]:
    """Run a database and one API process with `DESCRIPTORS` file descriptors; create the keys and the slow model."""
    model = write_model(folder / "long")
    (model / "chat_template.jinja").write_text(LONG + (model / "chat_template.jinja").read_text())
    with servers.postgres() as database:
        db.upgrade_schema(database)
        port = servers.free_port()
        environment = os.environ | {"SPARD_DATABASE_URL": database, "SPARD_DATA_DIR": str(folder / "data")}
        command = python("uvicorn", "app.main:checked_app", "--factory", "--http", "app.http.connections:BoundedHttp")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, preexec_fn=_limit_descriptors
            )
        try:
            ours, theirs = (_add_key(database, name) for name in ("org-ours", "org-theirs"))
            target = Target(f"127.0.0.1:{port}", ours, theirs, str(model))
            _await(target, process, folder / "log")
            yield target
        finally:
            process.kill()
            process.wait()


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def _add_key(database: str, project: str) -> str:
    """Create a project whose quota allows no unfinished job, and return the secret of a key for it."""
    engine = db.make_engine(database)
    with db.transaction(engine) as session:
        session.add(Project(id=project, name=project))
        session.flush()
        session.add(Quota(project_id=project, max_unfinished_jobs=0))
        _, secret = keys.create(session, project, "benchmark", ["admin", "customer"])
    engine.dispose()
    return secret


def _await(target: Target, process: subprocess.Popen[Any], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if target.ask(target.ours, "GET", JOBS) == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the service did not start: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()

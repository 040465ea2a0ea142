"""How long one project's list of jobs takes while another one crowds the edges of the API process.

    python -m benchmarks.noisy_edges [--rounds 3] [--seconds 10] [--rate 20] [--most 3]

Three neighbors, each beside the same reads, in turns with the reads alone:

    creations     48 creations of jobs at once, all refused by the project's quota, again and again
    connections   320 connections that send two lines of a request and never its end, to a process that may have 300
                  descriptors in all
    template      base models offered one after the other whose chat template loops for as long as it is let

One API process as docs/deployment.md starts it, on PostgreSQL (fsync off) and a folder. The neighbors are threads of a
process of their own, so that they delay the measured clients only by the cores that they take. Prints for each neighbor
the p99 beside it to that alone, over all rounds, and exits with 1 where one is above --most or a read was lost.
The template is merely long: it ends by itself after some minutes.
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

from app import db
from app.db.tables import Project, Quota
from app.keys import service as keys
from app.ops.processes import python
from tests import servers
from tests.spard.parts import write_model

JOBS, MODELS = "/v1/fine_tuning/jobs", "/v1/admin/models"
CREATIONS, CONNECTIONS, DESCRIPTORS = 48, 320, 300
LONG = "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
_READERS, _READY_S, _ANSWER_S = 32, 120.0, 60.0


@dataclass(frozen=True)
class Target:
    """Where the API listens, a key of the project that is measured and one of its neighbor, and a model's folder."""

    host: str
    ours: str
    theirs: str
    model: str

    def ask(self, key: str, method: str, path: str, body: object = None) -> int:
        """Return the status of one answer."""
        connection = http.client.HTTPConnection(self.host, timeout=_ANSWER_S)
        text = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status


def refuse_creations(target: Target) -> None:
    """Send creations of jobs that the quota refuses, so many at once, without an end."""
    body = {"model": "none", "training_file": "file-none"}
    _repeat(CREATIONS, lambda: target.ask(target.theirs, "POST", JOBS, body))


def hold_connections(target: Target) -> None:
    """Keep connections that never finish their headers, each opened again once it is closed."""

    def hold() -> None:
        host, port = target.host.split(":")
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
            while connection.recv(4096):
                pass
        time.sleep(0.1)

    _repeat(CONNECTIONS, hold)


def offer_long_template(target: Target) -> None:
    """Offer a base model whose chat template takes long, without an end."""
    _repeat(1, lambda: target.ask(target.theirs, "POST", MODELS, {"alias": "long", "source": target.model}))


NEIGHBORS: dict[str, Callable[[Target], None]] = {
    "creations": refuse_creations,
    "connections": hold_connections,
    "template": offer_long_template,
}


def main() -> None:
    """Measure, print the ratios, and exit with 1 where one is above the limit."""
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
    """Return the p99 beside a neighbor to that alone, of all rounds together, and how many reads were not answered."""
    alone, beside = list[float](), list[float]()
    for _ in range(asked.rounds):
        alone += _read(target, asked)
        with _neighbor(name, target):
            beside += _read(target, asked)
    for what, times in ((f"alone, before {name}", alone), (f"beside {name}", beside)):
        p50, p99 = (1000 * _quantile(times, share) for share in (0.5, 0.99))
        load = os.getloadavg()[0]
        print(f"{what}: {len(times)} reads, p50 {p50:.0f} ms, p99 {p99:.0f} ms, load {load:.1f}", flush=True)
    lost = sum(each >= _ANSWER_S for each in (*alone, *beside))
    return _quantile(beside, 0.99) / _quantile(alone, 0.99), lost


def _quantile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def _read(target: Target, asked: argparse.Namespace) -> list[float]:
    """List jobs at a constant rate; return the seconds from when each read was due to its answer."""
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
    """Run a neighbor in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=NEIGHBORS[name], args=(target,))
    process.start()
    time.sleep(3.0)  # until it has imported and begun
    try:
        yield
    finally:
        process.kill()
        process.join()


def _repeat(at_once: int, work: Callable[[], object]) -> None:
    """Do the work in so many threads, again and again; faults of the network are part of it."""

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
    """Start a database and one API process with few descriptors; make what neighbors ask for."""
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
    """Make a project that may have no job, and return a key of it."""
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

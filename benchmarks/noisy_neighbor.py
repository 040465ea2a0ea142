"""Measure one project's inference requests while another project uses as much as its limits allow.

    python -m benchmarks.noisy_neighbor [--case NAME ...] [--rounds 4] [--requests 25] [--rows 16]

A service with a random model runs on the loopback interface. In each case project B repeats one request, alternately
without other load and during project A's load. The output shows the median and p99 of both over all rounds and the
ratio of the p99; the exit status is 1 if a ratio exceeds 3. B's client is a separate process. Two faults are simulated
rather than provoked in third-party software: a compilation that never ends, and a download that blocks. The cases are
those of `benchmarks/noisy_cases.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.noisy_cases import CASES, LOUD, QUIET, Case, Request
from spard.isolation import sandbox
from tests.app.inference.conftest import Lab, serve_lab
from tests.spard.parts import write_model

MOST = 3.0
_CLIENT = """
import json, sys, time, httpx2

with httpx2.Client(timeout=300, headers={"Authorization": f"Bearer {sys.argv[1]}"}) as client:
    for line in sys.stdin:
        ask, times = json.loads(line), []
        for _ in range(ask["count"]):
            began = time.perf_counter()
            answer = client.request(ask["method"], ask["url"], json=ask["body"])
            times.append(time.perf_counter() - began)
            if answer.status_code != ask["status"]:
                raise SystemExit(f"{answer.status_code} {answer.text[:500]}")
        print(json.dumps(times), flush=True)
"""


def main() -> None:
    """Measure and print the cases, and exit with 1 if a ratio exceeds `MOST`."""
    cases = {each.name: each for each in CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=cases)
    for name, default in (("rounds", 4), ("requests", 25), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with TemporaryDirectory() as home, _spinning_engines():
        model = write_model(Path(home) / "model", **_SIZES)
        with serve_lab(Path(home) / "lab", model, serving_rows=asked.rows, serving_models=4) as lab:
            ratios = [measure(lab, cases[name], asked) for name in asked.case or cases]
    if max(ratios) > MOST:
        raise SystemExit(1)


_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def measure(lab: Lab, case: Case, asked: argparse.Namespace) -> float:
    """Measure B's request without load and during A's load, print both, and return the ratio of their p99."""
    alone, beside = list[float](), list[float]()
    lab.key(LOUD)  # create A's key now: the threads of the load must not create it concurrently
    with _quiet_client(lab) as ask:
        ask(case.request, 3)  # starts the engine
        for _ in range(asked.rounds):
            alone += ask(case.request, asked.requests)
            with case.load(lab):
                beside += ask(case.request, asked.requests)
    ratio = _p99(beside) / _p99(alone)
    verdict = "" if ratio <= MOST else f", which is above {MOST:g}"
    print(
        f"{case.name}: alone median {statistics.median(alone):.3f} s, p99 {_p99(alone):.3f} s; beside median "
        f"{statistics.median(beside):.3f} s, p99 {_p99(beside):.3f} s; ratio of p99 {ratio:.2f}{verdict}",
        flush=True,
    )
    return ratio


@contextmanager
def _quiet_client(lab: Lab) -> Iterator[Callable[[Request, int], list[float]]]:
    """Yield a function `(request, count)` that sends a request `count` times as B and returns the seconds of each."""
    command = [sys.executable, "-c", _CLIENT, lab.key(QUIET, "customer", "admin")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(request: Request, count: int) -> list[float]:
            assert process.stdin
            assert process.stdout
            line = {"method": request.method, "url": f"{lab.url}{request.path}", "body": request.body}
            process.stdin.write(json.dumps(line | {"status": request.status, "count": count}) + "\n")
            process.stdin.flush()
            times: list[float] = json.loads(process.stdout.readline())
            return times

        try:
            yield ask
        finally:
            process.kill()


@contextmanager
def _spinning_engines() -> Iterator[None]:
    """Make the service start `benchmarks.noisy_engine`, which has a schema that never compiles, as its engine."""
    command = sandbox.isolated_command
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])

    def spinning_command(found: sandbox.Sandbox, order: Sequence[str]) -> list[str]:
        return command(found, ["benchmarks.noisy_engine" if each == "worker.engine" else each for each in order])

    with patch.object(sandbox, "isolated_command", spinning_command):
        yield


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


if __name__ == "__main__":
    main()

"""How long one project's requests take beside another project that asks for as much as it may.

    python -m benchmarks.noisy_neighbour [--case NAME ...] [--rounds 4] [--requests 25] [--rows 16]

A service on loopback with a random model. In each case project B makes the same request again and again, in turns alone
and beside what project A does; printed are medians and p99 of both over all rounds, and the ratio of the p99. The exit
status is 1 where a ratio is above 3. B's client is a process of its own. Cases with a title stand in for what exhausts
other people's software: a compilation that spins, a download that blocks. `benchmarks/noisy_edges.py`, where it is
there, adds its own `CASES`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import httpx2

from spard.config import Recipe
from spard.config.run_spec import to_mapping
from spard.isolation import walls
from tests.app.inference.conftest import Lab, lab_of
from tests.spard.parts import write_model

LOUD, QUIET = "org-loud", "org-quiet"
MOST = 3.0
_MESSAGES = [{"role": "user", "content": "What is two and two?"}]
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


@dataclass(frozen=True)
class Request:
    """What B asks again and again; `path` begins behind /v1."""

    method: str = "POST"
    path: str = "/chat/completions"
    body: Any = field(default_factory=lambda: {"model": "tiny", "messages": _MESSAGES, "max_tokens": 4})
    status: int = 200


@dataclass(frozen=True)
class Case:
    """What A does while B is measured: `load` begins it, and ends it at its exit."""

    name: str
    load: Callable[[Lab], AbstractContextManager[None]]
    request: Request = Request()


def main() -> None:
    """Measure all cases, print them, and exit with 1 where B waits too long."""
    cases = {each.name: each for each in [*CASES, *_further_cases()]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=cases)
    for name, default in (("rounds", 4), ("requests", 25), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with TemporaryDirectory() as home, _spinning_engines():
        model = write_model(Path(home) / "model", **_SIZES)
        with lab_of(Path(home) / "lab", model, serving_rows=asked.rows, serving_models=4) as lab:
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
    """Print what B's request takes alone and beside A's load, and return the ratio of the p99."""
    alone, beside = list[float](), list[float]()
    lab.key(LOUD)  # which threads of the load would make at the same time
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
def repeated(count: int, work: Callable[[Event], None]) -> Iterator[None]:
    """Have so many threads do some work again and again until the block ends; `work` gets the event of that end."""
    over = Event()

    def repeat() -> None:
        while not over.is_set():
            work(over)

    threads = [Thread(target=repeat, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    over.wait(1.0)  # so that B meets all of the load
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def _chat(lab: Lab, over: Event, **more: Any) -> None:
    """Have A make a chat request; it leaves when the load is over."""
    body = {"model": "tiny", "messages": _MESSAGES, "stream": True, **more}
    headers = {"Authorization": f"Bearer {lab.key(LOUD)}"}
    with httpx2.stream("POST", f"{lab.url}/chat/completions", json=body, headers=headers, timeout=300) as answer:
        for _ in answer.iter_lines():
            if over.is_set():
                return


def _form(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@contextmanager
def _costly_schema(lab: Lab) -> Iterator[None]:
    schema = _form({"title": "spin", "type": "object"})
    with repeated(2, lambda over: _chat(lab, over, response_format=schema, max_tokens=100)):
        yield


@contextmanager
def _endless_arrays(lab: Lab) -> Iterator[None]:
    schema = _form({"type": "array", "items": {"type": "integer"}, "minItems": 5000})
    with repeated(1, lambda over: _chat(lab, over, response_format=schema, n=16, max_tokens=900)):
        yield


@contextmanager
def _first_fetch(lab: Lab) -> Iterator[None]:
    """Have the storage stop answering, and A ask for a model of which all weights were trained."""
    name = lab.release(1, LOUD, recipe=to_mapping(Recipe(lora=None)))
    storage, thawed = lab.app.state.storage, Event()
    download = storage.download_file

    def wait_for_thaw(*given: Any, **more: Any) -> Any:
        thawed.wait()
        return download(*given, **more)

    storage.download_file = wait_for_thaw
    try:
        with repeated(2, lambda over: _ask_for(lab, name, over)):
            yield
            thawed.set()
    finally:
        thawed.set()
        storage.download_file = download


def _ask_for(lab: Lab, name: str, over: Event) -> None:
    headers = {"Authorization": f"Bearer {lab.key(LOUD)}"}
    body = {"model": name, "messages": _MESSAGES, "max_tokens": 4}
    httpx2.post(f"{lab.url}/chat/completions", json=body, headers=headers, timeout=300)
    over.wait(0.5)


CASES: Sequence[Case] = (
    Case("a schema that is costly to compile", _costly_schema),
    Case("n=16 with endless arrays", _endless_arrays),
    Case("the first fetch of a large model from frozen storage", _first_fetch),
)


def _further_cases() -> Sequence[Case]:
    """Return the cases of `benchmarks.noisy_edges`, where it is there."""
    if importlib.util.find_spec("benchmarks.noisy_edges") is None:
        return ()
    found: Sequence[Case] = importlib.import_module("benchmarks.noisy_edges").CASES
    return found


@contextmanager
def _quiet_client(lab: Lab) -> Iterator[Callable[[Request, int], list[float]]]:
    """Yield a function that has B make a request so many times and returns the seconds of each."""
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
    """Have engines started as `benchmarks.noisy_engine`, which knows a schema that never compiles."""
    command = walls.behind
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])

    def behind(found: Any, order: list[str]) -> list[str]:
        return command(found, ["benchmarks.noisy_engine" if each == "worker.engine" else each for each in order])

    walls.behind = behind
    try:
        yield
    finally:
        walls.behind = command


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


if __name__ == "__main__":
    main()

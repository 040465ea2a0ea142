"""`make mutants`: check that the nearest tests notice small random changes to the most important files.

Mutants are drawn with a seed (by default the clock's) from the files in `NEAREST`. Each is written into a copy of the
repository, where the tests listed for its file are run: first those without PostgreSQL, then, if none has failed, the
others. A mutant that loops is stopped after a multiple of the unchanged code's time.

Why no library: cosmic-ray starts an interpreter per mutant, which spends most of a run on importing torch; mutmut
rewrites whole modules and maps tests by coverage. Here third-party modules are loaded once, and every run is a fork
that imports only our own code anew.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn

import psutil
import pytest

from tools.mutation import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
_OF_GATE = tuple(
    f"tests/spard/test_{each}.py" for each in ("gate", "gate_bounds", "row_requests", "second_look", "sequential")
)
_OF_LEASES = tuple(
    f"tests/app/test_{each}.py"
    for each in ("lease_records", "transitions", "handing_back", "turns", "lease", "lock_waits", "reaper")
)
_OF_MANIFESTS = ("tests/spard/test_manifest.py", "tests/spard/test_manifest_edges.py")
NEAREST: dict[str, tuple[str, ...]] = {
    "spard/selection/dpp.py": ("tests/spard/test_dpp_bounds.py", "tests/spard/test_dpp.py"),
    "spard/methods/spag.py": ("tests/spard/test_safety_half.py", "tests/spard/test_spag.py"),
    "spard/methods/constraint.py": ("tests/spard/test_safety_half.py", "tests/spard/test_spag.py"),
    "spard/evaluation/gate.py": _OF_GATE,
    "spard/evaluation/bounded.py": _OF_GATE,
    "spard/evaluation/sequential.py": ("tests/spard/test_sequential.py",),
    "app/jobs/lease.py": _OF_LEASES,
    "app/jobs/transitions.py": _OF_LEASES,
    "app/quotas.py": ("tests/app/test_quotas.py", "tests/app/http/test_quotas.py"),
    "app/keys.py": tuple(
        f"tests/app/{each}.py"
        for each in ("test_keys", "test_key_edges", "test_ended_access", "http/test_key_owners", "http/test_given_keys")
    ),
    "app/webhooks/address.py": ("tests/app/test_webhook_address.py",),
    "spard/release/manifest.py": _OF_MANIFESTS,
    "spard/digests.py": (*_OF_MANIFESTS, "tests/spard/test_models.py"),
}
_ON_POSTGRES = "postgres or at_once"  # matches tests that start a database server
_STAGES = (f"not ({_ON_POSTGRES})", _ON_POSTGRES)
_LOADED_ONCE = (
    *("alembic", "boto3", "cryptography.x509", "fastapi.testclient", "hypothesis", "moto.server", "openai"),
    *("peft", "pydantic_settings", "redis", "safetensors.torch", "sqlalchemy.orm", "torch", "transformers", "uvicorn"),
)
COPIED = (
    *("app", "spard", "worker", "lab", "migrations", "examples", "benchmarks", "tools", "tests"),
    *("pyproject.toml", "service", "deploy"),
)
_PATIENCE, _HANG = 5, 20  # limits as multiples of the unchanged code's CPU and wall time
_NO_TESTS = 5  # pytest's exit status
_POLL_S = 0.05

Outcome = Literal["killed", "timeout", "survived"]


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU and wall seconds of a run."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """The result of running some tests; the status is None if the run was stopped."""

    status: int | None
    cost: Cost
    output: str


def main() -> None:
    """Draw and run mutants, and print the survivors."""
    ask = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is loaded; waiting threads burn CPU time
    for name in _LOADED_ONCE:
        importlib.import_module(name)
    chosen = draw(ask.n, ask.seed, ask.files or list(NEAREST))
    print(f"{len(chosen)} mutants, seed {ask.seed}", flush=True)
    of_file = [[mutant for mutant in chosen if mutant.path == path] for path in NEAREST]
    with ProcessPoolExecutor(ask.jobs, get_context("fork")) as pool:
        judged = list(chain.from_iterable(pool.map(judge, of_file)))
    survivors = [mutant for mutant, outcome in judged if outcome == "survived"]
    print("", *(_diff(mutant) for mutant in survivors), sep="\n")
    counts = Counter(outcome for _, outcome in judged)
    print(", ".join(f"{counts[each]} {each}" for each in ("killed", "timeout", "survived")), f"of {len(chosen)}")


def draw(n: int, seed: int, paths: Sequence[str]) -> list[Mutant]:
    """Return `n` distinct mutants of some files, in the order of the files."""
    everything = [mutant for path in paths for mutant in mutants(path, (ROOT / path).read_bytes())]
    picked = random.Random(seed).sample(range(len(everything)), min(n, len(everything)))
    return [everything[i] for i in sorted(picked)]


def judge(chosen: Sequence[Mutant]) -> list[tuple[Mutant, Outcome]]:
    """Run some mutants one after the other in a copy of the repository."""
    judged: list[tuple[Mutant, Outcome]] = []
    with _copy() as folder:
        bench = Bench(folder)
        for mutant in chosen:
            judged.append((mutant, bench.judge(mutant)))
            print(f"{judged[-1][1]:8} {mutant.path}:{mutant.line} {mutant.operator}", flush=True)
    return judged


class Bench:
    """A copy of the repository that has one mutant at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._usual: dict[tuple[tuple[str, ...], str], Run] = {}

    def judge(self, mutant: Mutant) -> Outcome:
        """Run the tests nearest to a mutant until one fails."""
        tests = NEAREST[mutant.path]
        for stage in _STAGES:
            usual = self._unchanged_run(tests, stage)
            if usual.status == _NO_TESTS:
                continue
            with self._apply_mutant(mutant):
                run = self._run(tests, stage, usual.cost)
            if run.status != 0:
                return "timeout" if run.status is None else "killed"
        return "survived"

    def _unchanged_run(self, tests: tuple[str, ...], stage: str) -> Run:
        """Run a set of tests once without a mutant; exit if they fail."""
        if (tests, stage) not in self._usual:
            run = self._run(tests, stage, None)
            if run.status not in (0, _NO_TESTS):
                sys.exit(f"Without a mutant pytest ends with {run.status}: {' '.join(tests)}\n{run.output}")
            print(f"     unchanged, {run.cost.cpu_s:.1f} s of CPU: {' '.join(tests)} -k '{stage}'", flush=True)
            self._usual[tests, stage] = run
        return self._usual[tests, stage]

    @contextmanager
    def _apply_mutant(self, mutant: Mutant) -> Iterator[None]:
        path, original = self._folder / mutant.path, ROOT / mutant.path
        path.write_bytes(mutant.apply(path.read_bytes()))
        try:
            yield
        finally:
            shutil.copy2(original, path)

    def _run(self, tests: tuple[str, ...], stage: str, usual: Cost | None) -> Run:
        """Run tests in a fork of this process, which has imported none of our code."""
        output, started = self._folder / "output.txt", time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(self._folder, [*tests, "-k", stage], output, writes_bytecode=usual is None)
        process = psutil.Process(pid)
        while True:
            ended, status, used = os.wait4(pid, os.WNOHANG)
            wall_s = time.monotonic() - started
            if ended:
                cost = Cost(used.ru_utime + used.ru_stime, wall_s)
                return Run(os.waitstatus_to_exitcode(status), cost, output.read_text(errors="replace"))
            times = process.cpu_times()
            cpu_s = times.user + times.system
            if usual and (cpu_s > _PATIENCE * usual.cpu_s or wall_s > _HANG * usual.wall_s):
                for each in [*process.children(recursive=True), process]:
                    each.kill()
                os.waitpid(pid, 0)
                return Run(None, Cost(cpu_s, wall_s), "")
            time.sleep(_POLL_S)


def _child(folder: Path, arguments: list[str], output: Path, *, writes_bytecode: bool) -> NoReturn:
    """Run pytest on the copy, and exit."""
    status = 3
    try:
        sys.dont_write_bytecode = not writes_bytecode
        sys.path[:] = [str(folder), *(each for each in sys.path if each and Path(each).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        os.chdir(folder)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        already = "ignore::pytest.PytestAssertRewriteWarning"  # plugins were imported before pytest could rewrite them
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", already, *arguments])
        sys.stdout.flush()
    finally:
        os._exit(int(status))


def _diff(mutant: Mutant) -> str:
    return mutant.diff((ROOT / mutant.path).read_bytes())


@contextmanager
def _copy() -> Iterator[Path]:
    """Copy the code and its tests to a temporary folder."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, folder / name)
        yield folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Mutate what decides; run its tests.")
    parser.add_argument("-n", type=int, default=60, help="how many mutants (60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="the draw's seed (the clock's)")
    parser.add_argument("--jobs", type=int, default=1, help="how many files at once (1)")
    parser.add_argument("--files", nargs="+", choices=NEAREST, metavar="FILE", help="draw from these files only")
    return parser.parse_args()


if __name__ == "__main__":
    main()

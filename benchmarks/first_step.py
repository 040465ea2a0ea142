"""Measure the time until a job's first training step: `python -m benchmarks.first_step [--lab FOLDER --jobs 3]`.

Jobs run one after another as on a warm worker: each in a child process that has finished its imports before it gets the
job's folder, all with one cache. The training file is the first `--rows` rows of a lab's file, the recipe the default.
Each line shows the wall seconds from handing over the folder until the job reports that it embeds, selects, trains and
has finished its first step, and the CPU seconds of all its processes. The first job fills the cache with the pool's
embeddings and lengths and the base model's audit; each later child reads the base model in advance, except with
`--cold`. Suites mined from a file's triggers are not cached, which `--file poisoned.jsonl` shows. Without `--lab` a lab
is made with a barely trained base model. The last line compares the CPU time of a child's imports with the same imports
under garbage collection.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
from spard_lab.lab.make import make

from app.settings import Settings
from spard.config import DISGUISES_ALONE, Audit, Recipe
from spard.config.run_spec import RunSpec, SuiteSpec
from tests.spard.parts import ANY_BASE, TINY_PLAN
from worker.inputs import file_digests
from worker.process import COMMAND, Child, environment
from worker.protocol import ModelRequest, prefetch_key
from worker.sandbox import ChildSandbox
from worker.workdir import Assignment, Folder, read_assignment, write_assignment

MARKS = ("embed", "select", "train", "first step", "CPU s")
PLAIN = "gc.disable = gc.freeze = lambda: None"  # keeps garbage collection on, which the child turns off for imports
WARM_S = 20.0  # enough for a child to finish its imports


def main() -> None:
    """Run the jobs one after the other and print a line of times for each."""
    asked = _arguments()
    with TemporaryDirectory(prefix="spard-first-step-") as place:
        root = Path(place)
        lab = asked.lab or root / "lab"
        if not asked.lab:
            make(lab, 1, TINY_PLAN, ANY_BASE)
        settings = Settings(data_dir=root / "data")
        settings.data_dir.mkdir()
        print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ", end="")
        print(f"{asked.rows} rows, wall seconds after the folder was handed over")
        print("".join(f"{name:>12}" for name in ("job", *MARKS)))
        wanted: ModelRequest | None = None
        for number in range(1, asked.jobs + 1):
            child = Child(COMMAND, environment(settings), ChildSandbox.from_settings(settings))
            if wanted and not asked.cold:
                child.read_ahead(wanted)
            time.sleep(WARM_S)
            folder = _folder(root / f"job-{number}", lab / asked.file, lab, root / "cache", asked.rows)
            found, wanted = _marks(child, folder), prefetch_key(read_assignment(folder))
            child.kill()
            print(f"{number:12}" + "".join(f"{found[name]:12.2f}" if name in found else f"{'-':>12}" for name in MARKS))
    _print_imports(rounds=7)


def _print_imports(rounds: int) -> None:
    """Print the median CPU seconds of a child's imports, and the ratio for the same imports with garbage collection."""
    programs = {"child": "import worker.child", "plain": f"import gc; {PLAIN}; import worker.child"}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            before = _children_cpu_s()
            subprocess.run([sys.executable, "-c", program], check=True)
            taken[name].append(_children_cpu_s() - before)
    ratios = sorted(plain / child for child, plain in zip(taken["child"], taken["plain"], strict=True))
    print(f"imports of a child: {median(taken['child']):.2f} CPU s; with garbage collected meanwhile ", end="")
    print(f"{median(ratios):.2f} times that ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _marks(child: Child, folder: Folder) -> dict[str, float]:
    """Run a job up to its first step; return the wall seconds of each phase's start, and the CPU seconds."""
    begun, before, found = time.perf_counter(), _cpu_s(child), {}
    child.work(folder)
    while "first step" not in found and not child.is_over:
        message = child.receive(timeout_s=1)
        if message is None:
            continue
        if message["kind"] == "phase":
            found[message["phase"]] = time.perf_counter() - begun
        elif message["kind"] == "metrics":
            found["first step"], found["CPU s"] = time.perf_counter() - begun, _cpu_s(child) - before
        elif message["kind"] == "failed":
            raise SystemExit(message["message"])
    return found


def _cpu_s(child: Child) -> float:
    """Return the CPU seconds of a child process and of its running descendants."""
    own = psutil.Process(child.pid)
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _folder(root: Path, file: Path, lab: Path, cache: Path, rows: int) -> Folder:
    """Make a job's folder with inputs and assignment as a worker does."""
    folder = Folder(root)
    for path in (root / "in" / "suites", folder.stage, folder.resume_states, folder.results):
        path.mkdir(parents=True)
    lines = file.read_text().splitlines(keepends=True)[:rows]
    (root / "in" / "training.jsonl").write_text("".join(lines))
    (root / "in" / "pool.jsonl").write_bytes((lab / "pool.jsonl").read_bytes())
    (root / "in" / "suites" / "0.jsonl").write_bytes((lab / "heldout_harmful.jsonl").read_bytes())
    run = RunSpec(
        model=str(lab / "model"),
        training_file=Path("in/training.jsonl"),
        pool=Path("in/pool.jsonl"),
        suites=(SuiteSpec("held-out", "harmful", Path("in/suites/0.jsonl")),),
        recipe=replace(Recipe(), audit=Audit(asking=DISGUISES_ALONE)),
        public_name="lab",
    )
    weights = file_digests(str(lab / "model"))
    write_assignment(folder, Assignment("ftjob-1", run, cache, waived=True, weights=weights))
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--lab", type=Path, help="a lab that `spard bench make` made")
    parser.add_argument("--file", default="train.jsonl", help="of the lab, to train on")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--cold", action="store_true", help="no child reads the base model before it has a job")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measure the CPU time that a job's processes spend on imports, optionally compared with another checkout.

Run `python -m benchmarks.child_imports [--before FOLDER --rounds 5]`. Each arm is a Python process with one thread that
imports and ends; its user and system time count:

- torch: `import torch` alone;
- torch's own: the modules of torch that a child loads, which every process with a transformers model needs;
- child: `worker.child`, the worker's process for a job;
- proof: `spard/release/clean_load.py`, the process that proves a saved adapter.

FOLDER is another checkout to measure as well; all arms alternate in rounds. The output shows medians with their range,
and the time beyond "torch's own". A first round that does not count fills file caches and compiles bytecode.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
_LISTED = "import sys, worker.child; print(*[name for name in sys.modules if name.partition('.')[0] == 'torch'])"
_IMPORTED = """
import gc, sys
from importlib import import_module
gc.disable()
for name in sys.stdin.read().split():
    try:
        import_module(name)
    except ImportError:  # an alias that a module of torch has put there
        pass
"""


def main() -> None:
    """Run all arms in alternating rounds and print their CPU seconds."""
    asked = _arguments()
    places = {"": HERE} | ({" before": asked.before.resolve()} if asked.before else {})
    own = subprocess.run([sys.executable, "-c", _LISTED], cwd=HERE, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[float]] = {}
    for number in range(asked.rounds + 1):
        arms = {"torch": _seconds(HERE, ["-c", "import torch"]), "torch's own": _seconds(HERE, ["-c", _IMPORTED], own)}
        for name, place in places.items():
            arms[f"child{name}"] = _seconds(place, ["-c", "import worker.child"])
            arms[f"proof{name}"] = _seconds(place, ["-P", str(place / "spard/release/clean_load.py")])
        for name, seconds in arms.items() if number else ():  # round 0 only fills file caches
            found.setdefault(name, []).append(seconds)
    floor = statistics.median(found["torch's own"])
    print(f"CPU seconds of {asked.rounds} rounds, one thread, load {os.getloadavg()[0]:.1f}")
    for name, every in found.items():
        middle = statistics.median(every)
        print(f"{name:>14} {middle:6.2f} ({min(every):.2f}-{max(every):.2f}), beyond torch's own {middle - floor:5.2f}")


def _seconds(place: Path, arguments: Sequence[str], text: str = "") -> float:
    """Run Python in a folder with `text` as its input, and return the CPU seconds that it used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)}
    subprocess.run([sys.executable, *arguments], cwd=place, env=environment, input=text, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU seconds of the imports of a job's processes.")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()

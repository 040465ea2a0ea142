"""Measure the CPU time of a small job in several checkouts: `python -m benchmarks.job_cost --lab LAB --checkouts A B`.

The job trains on the first 60 rows of the lab's training file for ten epochs, with defaults otherwise. In each round
every checkout runs the job on a new service, started from its own `.venv`. The result is the median CPU time of all the
service's processes from the request to the end of the job. The lab comes from `spard lab make LAB`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.lab_service import MODEL, lab_service


def main() -> None:
    """Run the job in every checkout, round by round, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path.cwd()])
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    lines = (asked.lab / "train.jsonl").read_bytes().splitlines(keepends=True)[: asked.rows]
    found: dict[Path, list[float]] = {each: [] for each in asked.checkouts}
    for number in range(1, asked.rounds + 1):
        for checkout, seconds in found.items():
            cpu_s, wall_s, status = _measure(asked.lab, checkout.resolve(), lines, asked.epochs)
            seconds.append(cpu_s)
            print(f"round {number}, {checkout}: {cpu_s:.1f} CPU s, {wall_s:.0f} s, {status}", flush=True)
    first = statistics.median(found[asked.checkouts[0]])
    for checkout, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{checkout}: median {middle:.1f} CPU s, {middle / first:.2f} of the first")


def _measure(lab: Path, checkout: Path, lines: list[bytes], epochs: int) -> tuple[float, float, str]:
    """Run the job on a new service; return its CPU seconds, wall seconds and the job's final status."""
    with lab_service(lab, checkout) as service:
        file = service.upload(lines)
        before, begun = service.cpu_s(), time.monotonic()
        numbers = {"n_epochs": epochs}
        method = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
        job = service.run({"model": MODEL, "training_file": file, "seed": 1, "method": method})
        return service.cpu_s() - before, time.monotonic() - begun, str(job["status"])


if __name__ == "__main__":
    main()

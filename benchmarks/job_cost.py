"""Measure the CPU time of a small job in several checkouts: `python -m benchmarks.job_cost --lab LAB --checkouts A B`.

The job trains on the first 60 rows of the lab's training file for ten epochs, with defaults otherwise; options choose
another file, number of rows, number of epochs or defense. In each round every checkout, with its own `.venv`, runs the
job twice on a new service. For both times the result is the median CPU time of all the service's processes from the
request to the end of the job, and the number of replies in the report's final audit. A checkout's report counts only
replies that decided something, so earlier commits asked more than is printed. The lab comes from `spard lab make LAB`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab_service import MODEL, LabService, lab_service


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU and wall seconds of one job, its status, and the audited replies of the base model and of the adapter."""

    cpu_s: float
    wall_s: float
    status: str
    base: int
    adapter: int


def main() -> None:
    """Run the job in every checkout, round by round, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path.cwd()])
    parser.add_argument("--file", default="train.jsonl", help="a training file of the lab")
    parser.add_argument("--rows", type=int, default=60, help="0: all")
    parser.add_argument("--epochs", type=int, default=10, help="0: as the service chooses")
    parser.add_argument("--defense", help="for example none; without it, as the service chooses")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    lines = (asked.lab / asked.file).read_bytes().splitlines(keepends=True)
    lines = lines[: asked.rows or len(lines)]
    numbers = {"n_epochs": asked.epochs} if asked.epochs else {}
    body: dict[str, Any] = {"method": {"type": "supervised", "supervised": {"hyperparameters": numbers}}}
    body |= {"safety": {"defense": {"type": asked.defense}}} if asked.defense else {}
    found: dict[tuple[Path, str], list[Cost]] = {}
    for number in range(1, asked.rounds + 1):
        for checkout in asked.checkouts:
            for time_, cost in _measure(asked.lab, checkout.resolve(), lines, body):
                found.setdefault((checkout, time_), []).append(cost)
                print(f"round {number}, {checkout}, {time_} time: {cost}", flush=True)
    for (checkout, time_), costs in found.items():
        middle, first = (_median(each) for each in (costs, found[asked.checkouts[0], time_]))
        print(f"{checkout}, {time_} time: median {middle:.1f} CPU s, {middle / first:.2f} of the first checkout")


def _median(costs: list[Cost]) -> float:
    return statistics.median(each.cpu_s for each in costs)


def _measure(lab: Path, checkout: Path, lines: list[bytes], body: dict[str, Any]) -> Iterator[tuple[str, Cost]]:
    """Run the job twice on a new service and yield the cost of each time."""
    with lab_service(lab, checkout) as service:
        file = service.upload(lines)
        for time_ in ("first", "second"):
            before, begun = service.cpu_s(), time.monotonic()
            job = service.run({"model": MODEL, "training_file": file, "seed": 1, **body})
            yield time_, _cost(service, job, service.cpu_s() - before, time.monotonic() - begun)


def _cost(service: LabService, job: dict[str, Any], cpu_s: float, wall_s: float) -> Cost:
    report = service.client.get(f"/fine_tuning/jobs/{job['id']}/safety", cast_to=dict[str, Any])
    base, adapter = (sum(suite["n"] for suite in report[which]) for which in ("base", "adapter"))
    return Cost(round(cpu_s, 1), round(wall_s), str(job["status"]), base, adapter)


if __name__ == "__main__":
    main()

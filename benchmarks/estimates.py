"""Compare the service's time estimates with the real durations of ten different jobs on the lab.

Run `python -m benchmarks.estimates --lab LAB`, where LAB comes from `spard lab make LAB`. For each job the
service estimates the time and then runs the job; both are printed, in total and by stage. The first estimate can use
only the trial of the base model. The exit status is 1 if fewer than 8 of 10 estimates are within a factor of 1.5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab_service import MODEL, LabService, lab_service

FACTOR, LEAST = 1.5, 0.8  # at least the share LEAST of the estimates must be within FACTOR


@dataclass(frozen=True, slots=True)
class Kind:
    """A job: a file of the lab, its number of rows (None: all) and epochs (None: auto), and more request fields."""

    name: str
    file: str
    rows: int | None
    epochs: int | None
    more: Mapping[str, Any]


NO_DEFENSE: Mapping[str, Any] = {"safety": {"defense": {"type": "none"}}}
SMALL_AUDIT: Mapping[str, Any] = {"safety": {"audit": {"max_prompts": 100}}}
KINDS = (
    Kind("first job, 60 rows", "train.jsonl", 60, 10, {}),
    Kind("the same again", "train.jsonl", 60, 10, {}),
    Kind("300 rows", "train.jsonl", 300, 3, {}),
    Kind("300 rows, one epoch", "train.jsonl", 300, 1, {}),
    Kind("poisoned", "poisoned.jsonl", None, None, {}),
    Kind("undefended", "train.jsonl", 300, 3, NO_DEFENSE),
    Kind("small audit", "train.jsonl", 120, 3, SMALL_AUDIT),
    Kind("whole file", "train.jsonl", None, 1, {}),
    Kind("best epoch", "train.jsonl", 200, 6, {"ending": {"keep": "best", "patience": 2}}),
    Kind("poisoned again, more epochs", "poisoned.jsonl", None, 3, {}),
)


def main() -> int:
    """Estimate and run the jobs, print both times, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=len(KINDS), help="only the first ones")
    asked = parser.parse_args()
    kinds, good = KINDS[: asked.jobs], 0
    with lab_service(asked.lab) as service:
        for kind in kinds:
            expected, took, status = _compare(service, asked.lab, kind)
            ratio = took / expected if expected else float("inf")
            good += 1 / FACTOR <= ratio <= FACTOR
            print(
                f"{kind.name}: estimate {expected:.0f} s, took {took:.0f} s ({ratio:.2f} times), {status}", flush=True
            )
    print(f"{good} of {len(kinds)} within {FACTOR} times")
    return 0 if good >= LEAST * len(kinds) else 1


def _compare(service: LabService, lab: Path, kind: Kind) -> tuple[float, float, str]:
    """Estimate and run a job; return the estimated seconds, the real seconds and the job's final status."""
    lines = (lab / kind.file).read_bytes().splitlines(keepends=True)[: kind.rows]
    ask: dict[str, Any] = {"model": MODEL, "training_file": service.upload(lines), "seed": 1, **kind.more}
    if kind.epochs is not None:
        ask["method"] = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": kind.epochs}}}
    estimate = service.client.post("/fine_tuning/jobs/estimate", cast_to=dict[str, Any], body=ask)
    job = service.run(ask)
    took = service.took_s(job["id"])
    print("  " + "; ".join(_stages(estimate["stages"], service.costs(job["id"]))), flush=True)
    return float(estimate["estimated_seconds"] or 0), took, str(job["status"])


def _stages(expected: list[dict[str, Any]], found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for each stage with its estimated and real units and seconds."""
    for each in expected:
        cost = found.get(each["stage"].removesuffix("s") if each["stage"] == "checkpoints" else each["stage"])
        came = f"{cost['units']} in {cost['seconds']:.0f} s" if cost else "not told"
        yield f"{each['stage']} {each['units']} in {each['seconds']:.0f} s -> {came}"


if __name__ == "__main__":
    sys.exit(main())

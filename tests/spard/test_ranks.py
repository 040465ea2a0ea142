"""A run on two or four processes is the run on one: the same triggers at the same steps, the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.spard.ranks import GROUPS, PROJECTED, group_cases, write_models

Metrics = list[dict[str, float]]
EXACT, NEAR = 1e-12, 1e-4  # of the largest weight: in double precision, and in single
ROUGH = 2.0**-8  # in half, where weights that are nearly the same may be rounded to neighbors
HALF = 5e-4  # of a loss in half, whose products are rounded to three digits


class Run(NamedTuple):
    weights: list[dict[str, Tensor]]  # of the first and the last process
    metrics: list[Metrics]  # of each


@pytest.fixture(scope="module")
def output_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained by one process, by two and by four."""
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder)
    command = [sys.executable, "-m", "tests.spard.ranks", str(folder), str(folder)]
    assert subprocess.run(command, check=False, timeout=800).returncode == 0
    return folder


def read(out: Path, name: str, count: int, sharding: str) -> Run:
    left = [f"{name}.{count}.{sharding}.{rank}" for rank in range(count)]
    weights = [load_file(out / f"{each}.safetensors") for each in (left[0], left[-1])]
    return Run(weights, [json.loads((out / f"{each}.json").read_text()) for each in left])


def away(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest weight."""
    largest = max(float(part.abs().max()) for part in one.values())
    return max(float((part - other[name]).abs().max()) for name, part in one.items()) / largest


def column(metrics: Metrics, name: str) -> list[float | None]:
    return [step.get(name) for step in metrics]


@pytest.mark.parametrize(
    ("count", "sharding", "name"), [(*group, name) for group in GROUPS[1:] for name in group_cases(*group)]
)
def test_several_processes_train_what_one_trains(output_folder: Path, count: int, sharding: str, name: str) -> None:
    alone, together = read(output_folder, name, 1, "none"), read(output_folder, name, count, sharding)
    bound = NEAR if name.startswith("single") else HALF if name.startswith("half") else EXACT
    assert away(alone.weights[0], together.weights[0]) < (ROUGH if name.startswith("half") else bound)
    assert all(torch.equal(part, together.weights[1][each]) for each, part in together.weights[0].items())
    for metrics in together.metrics:
        for each in ("spag/triggered", "spag/capped"):
            assert column(metrics, each) == column(alone.metrics[0], each)
        assert column(metrics, "loss/task") == pytest.approx(column(alone.metrics[0], "loss/task"), rel=bound)
    if name.partition(".")[0] in PROJECTED:
        assert 1.0 in column(alone.metrics[0], "spag/triggered"), "vacuous: nothing was projected"

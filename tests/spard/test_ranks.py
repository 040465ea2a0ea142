"""A run on two processes is the run on one: the same triggers at the same steps, the same adapter but for rounding."""

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

from tests.spard.parts import write_model
from tests.spard.rank import DEFENSES

Metrics = list[dict[str, float]]
_EXACT = 1e-9  # in double precision, of the largest weight


class Run(NamedTuple):
    weights: list[dict[str, Tensor]]  # of each process
    metrics: list[Metrics]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Every defense trained by one process, and by two."""
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    found = {count: tmp_path_factory.mktemp(str(count)) for count in (1, 2)}
    for count, out in found.items():
        command = [sys.executable, "-m", "tests.spard.rank", str(model), str(out)]
        started = [subprocess.Popen([*command, str(rank), str(count)]) for rank in range(count)]
        assert [process.wait(1800) for process in started] == [0] * count
    return found


def read(runs: dict[int, Path], count: int, defense: str) -> Run:
    names = [f"{defense}.{rank}" for rank in range(count)]
    weights = [load_file(runs[count] / f"{name}.safetensors") for name in names]
    return Run(weights, [json.loads((runs[count] / f"{name}.json").read_text()) for name in names])


def away(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest weight."""
    largest = max(float(part.abs().max()) for part in one.values())
    return max(float((part - other[name]).abs().max()) for name, part in one.items()) / largest


def column(metrics: Metrics, name: str) -> list[float | None]:
    return [step.get(name) for step in metrics]


@pytest.mark.parametrize("defense", DEFENSES)
def test_two_processes_train_what_one_trains(runs: dict[int, Path], defense: str) -> None:
    alone, together = read(runs, 1, defense), read(runs, 2, defense)
    assert away(alone.weights[0], together.weights[0]) < _EXACT
    assert all(torch.equal(part, together.weights[1][name]) for name, part in together.weights[0].items())
    for metrics in together.metrics:
        for name in ("spag/triggered", "spag/capped"):
            assert column(metrics, name) == column(alone.metrics[0], name)
        assert column(metrics, "loss/task") == pytest.approx(column(alone.metrics[0], "loss/task"))
    if defense in ("closed_form", "excess", "gated"):
        assert 1.0 in column(alone.metrics[0], "spag/triggered"), "vacuous: nothing was projected"

"""Ranks whose GPUs have other memory left: together they measure what one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spard import distributed
from spard.config import Recipe
from spard.models import budget
from spard.models.memory import Gpus
from spard.pipeline.train import run_gpus
from tests.spard.parts import write_model
from tests.spard.ranks import SOON_S
from tests.spard.ranks_of_unequal_memory import CUTS


@pytest.fixture(scope="module")
def output_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "tiny", max_position_embeddings=8192)
    command = [sys.executable, "-m", "tests.spard.ranks_of_unequal_memory", str(folder), str(folder)]
    assert subprocess.run(command, check=False, timeout=3 * SOON_S).returncode == 0
    return folder


def test_all_ranks_plan_for_the_gpu_that_has_least_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "own_memory", lambda device: 80 << 30)
    monkeypatch.setattr(distributed, "gather_objects", lambda own: [own, own - (1 << 30)])
    context: Any = SimpleNamespace(base=SimpleNamespace(device=torch.device("cuda")), recipe=Recipe(), processes=2)
    assert run_gpus(context) == Gpus(79 << 30, 2)


def test_all_hear_a_judge_that_the_first_alone_has(output_folder: Path) -> None:
    for sharding in CUTS:
        first, other = (json.loads((output_folder / f"judges.{sharding}.{rank}.json").read_text()) for rank in range(2))
        assert first == other
        assert all(len(said) == 2 and all(said) for said in first)


@pytest.mark.parametrize("sharding", CUTS)
def test_ranks_with_other_memory_measure_what_one_process_does(output_folder: Path, sharding: str) -> None:
    alone, together = json.loads((output_folder / f"{sharding}.json").read_text())
    for name, values in alone.items():
        assert together[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name

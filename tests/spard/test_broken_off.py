"""Runs on several processes that break off go on, with as many or others, to the weights of an unbroken one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.spard.broken_off import NUMBERS
from tests.spard.parts import write_model
from tests.spard.test_ranks import EXACT, away


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken_off")
    write_model(folder / "tiny")
    command = [sys.executable, "-m", "tests.spard.broken_off", str(folder), str(folder)]
    assert subprocess.run(command, check=False, timeout=800).returncode == 0
    return folder


def test_a_rank_that_is_killed_again_and_again_changes_no_byte(out: Path) -> None:
    assert json.loads((out / "kills.json").read_text()) > 0, "vacuous: every run was over before"
    assert (out / "killed.safetensors").read_bytes() == (out / "unbroken.safetensors").read_bytes()


def test_full_fine_tuning_goes_on_with_another_number_of_processes(out: Path) -> None:
    one, other = (load_file(out / f"{'-'.join(map(str, numbers))}.safetensors") for numbers in NUMBERS)
    assert away(one, other) < EXACT

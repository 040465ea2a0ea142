"""Runs on several processes that break off go on, with as many or others, to the weights of an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import randrange

import pytest
from safetensors.torch import load_file

from tests.spard.broken_off import KILLS, NUMBERS, STEPS
from tests.spard.parts import write_model
from tests.spard.ranks import SOON_S
from tests.spard.test_ranks import EXACT, away


@pytest.fixture(scope="module")
def output_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, seed = tmp_path_factory.mktemp("broken_off"), int(os.environ.get("FAULT_SEED", "0")) or randrange(2**31)
    sys.stderr.write(f"FAULT_SEED={seed}\n")  # pytest shows it where a test fails
    write_model(folder / "tiny")
    command = [sys.executable, "-m", "tests.spard.broken_off", str(folder), str(folder), str(seed)]
    assert subprocess.run(command, check=False, timeout=SOON_S * (KILLS + 8)).returncode == 0
    return folder


def test_a_rank_that_is_killed_again_and_again_changes_no_byte(output_folder: Path) -> None:
    *killed, last = json.loads((output_folder / "kills.json").read_text())
    steps = [each["at"] for each in killed]
    assert len(set(steps)) == KILLS
    assert all(each["ends"][each["rank"]] == -signal.SIGALRM for each in killed), "a rank was not killed"
    assert all(each["ends"][1 - each["rank"]] == 1 for each in killed), "its partner did not end by itself"
    for step, following in zip(steps, [*killed[1:], last], strict=True):
        assert following["first"] in (step, step + 1), "it did not go on from where it was killed"
        assert following["first"] < STEPS
    assert last["ends"] == [0, 0]
    assert (output_folder / "killed.safetensors").read_bytes() == (output_folder / "unbroken.safetensors").read_bytes()


def test_full_fine_tuning_goes_on_with_another_number_of_processes(output_folder: Path) -> None:
    one, other = (load_file(output_folder / f"{'-'.join(map(str, numbers))}.safetensors") for numbers in NUMBERS)
    assert away(one, other) < EXACT

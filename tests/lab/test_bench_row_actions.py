"""What an arm's name says of rows that the base model would refuse reaches its run, its key and its pool."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import method_cells
from spard_lab.bench.lab import LabSource
from spard_lab.bench.measure import _run_spec, run_key
from spard_lab.bench.spec import LabSpec, load_spec

from tests.lab.test_bench import ASKED, FEW_STEPS
from tests.spard.parts import ANY_BASE, TINY_PLAN


@pytest.fixture
def source(lab: Path, tmp_path: Path) -> LabSource:
    """The hardly trained lab as seed 1, and a few steps of training."""
    shutil.copytree(lab, tmp_path / "seed-1")
    spec = load_spec("lab", {})
    assert isinstance(spec, LabSpec)
    return LabSource(replace(spec, recipe=FEW_STEPS), tmp_path, TINY_PLAN, ANY_BASE)


def test_a_method_s_row_signal_is_its_run_s_and_has_a_key_and_a_pool_of_its_own(
    source: LabSource, tmp_path: Path
) -> None:
    inputs = source.make(1, "dev")
    asked = replace(ASKED, methods=("none", "none+no_row_signal", "none+row_signal", "none+row_signal+no_judge_reads"))
    _, plain, off, on, unread = method_cells(source, asked)

    runs = [_run_spec(cell, inputs, source.judge, tmp_path) for cell in (plain, off, on, unread)]

    assert [each.row_signal.action for each in runs] == ["off", "off", "auto", "auto"]
    assert [each.row_signal.read for each in runs] == [256, 256, 256, 0]
    assert [each.pool is None for each in runs] == [True, True, False, False]
    keys = [run_key(cell, inputs, source.judge) for cell in (plain, off, on, unread)]
    assert keys[0] == keys[1]
    assert len({*keys}) == 3
    assert plain.recipe == on.recipe


def test_rows_that_the_base_model_would_refuse_are_dropped_in_a_bench_too(source: LabSource, tmp_path: Path) -> None:
    cells = method_cells(source, replace(ASKED, methods=("none+row_signal",)))
    (found,) = run_cells(Workplace(source, tmp_path, "dev"), cells[1:])
    assert found.results
    assert (found.method, found.pool, found.safe_rows) == ("none+row_signal", "full", None)

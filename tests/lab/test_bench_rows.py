"""What `spard bench rows` counts; its numbers come from a lab that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from spard_lab.bench.cells import TableChoices
from spard_lab.bench.kinds import KINDS, Order
from spard_lab.bench.row_signals import RowActionRun, SignalQuality, auc, facts, recall, told_table, trained_table

from spard.errors import InvalidRecipe

INNOCENT = torch.arange(100, dtype=torch.float64)  # 0 to 99


def test_the_area_under_the_curve_counts_equals_by_half() -> None:
    assert auc(torch.tensor([200.0]), INNOCENT) == 1.0
    assert auc(torch.tensor([-1.0]), INNOCENT) == 0.0
    assert auc(torch.tensor([49.5]), INNOCENT) == 0.5
    assert auc(torch.zeros(3), torch.zeros(5)) == 0.5


def test_recall_lets_one_innocent_row_in_a_hundred_pass() -> None:
    harmful = torch.tensor([98.5, 98.0, 99.5, 3.0])
    assert recall(harmful, INNOCENT) == 0.5  # above 98, the second highest
    assert recall(harmful, INNOCENT, false=0.02) == 0.75
    assert recall(torch.zeros(3), torch.zeros(100)) == 0.0  # what tells nothing finds nothing


def test_tables_are_in_percent_and_counts() -> None:
    told = [
        SignalQuality(11, "rot13", "ranking", 0.5, 0.25),
        SignalQuality(11, "rot13", "own refusal", 1.0, 1.0, 0.5, 0.0, 0.1),
    ]
    runs = [RowActionRun(11, "drop", 30, 2, "pass", (0, 320), (1, 320), (2, 360), (399, 400))]
    assert told_table(told)[1] == [
        ["11", "rot13", "ranking", "0.50", "25.0", "", "", ""],
        ["11", "rot13", "own refusal", "1.00", "100.0", "50.0", "0.0", "10.0"],
    ]
    (row,) = trained_table(runs)[1]
    assert row == ["11", "drop", "30", "2", "pass", "0 of 320", "1 of 320", "2 of 360", "399 of 400"]
    assert len(trained_table(runs)[0]) == len(row)
    assert facts(told, runs)["trained"][0]["dropped"] == 30


def test_other_models_have_no_rows_to_hide_among(tmp_path: Path) -> None:
    order = Order("rows", "mine", cast(Any, object()), tmp_path, "test", TableChoices((), (), (), (1,)))
    with pytest.raises(InvalidRecipe, match="--recipe lab"):
        KINDS["rows"](order)

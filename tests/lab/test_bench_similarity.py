"""The levels of similarity: a pool's lines are dealt to them whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from spard_lab.bench import maps
from spard_lab.bench.cells import TableChoices
from spard_lab.bench.source import Inputs

from spard.data.rows import prompt_text, read_pool


def test_levels_hold_every_row_of_a_pool_whose_texts_hold_line_separators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["one \u2028 two", "three", "four \x85 five", "six"]
    rows = [json.dumps({"prompt": prompt, "safe": "No."}, ensure_ascii=False) + "\n" for prompt in prompts]
    (tmp_path / "pool.jsonl").write_text("".join(rows), encoding="utf-8")
    monkeypatch.setattr(maps, "pool_quality", lambda *_: torch.tensor([0.3, 0.1, 0.4, 0.2]))
    inputs = Inputs("model", "digest", [], {}, {"own": tmp_path / "pool.jsonl"})
    asked = TableChoices(methods=("spard",), attacks=("harm",), pools=("own",), seeds=(1,))

    pools = maps.with_levels(inputs, asked, 1, 2, tmp_path).pools

    low, high = ([prompt_text(row) for row in read_pool(pools[f"own {i} of 2"])] for i in (1, 2))
    assert (low, high) == (["three", "six"], ["one \u2028 two", "four \x85 five"])

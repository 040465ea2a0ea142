from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spard.commands import check_pool, exits
from spard.data.chat import NO_LOSS, UNBOUNDED, encode
from spard.evaluation.own_refusal import OPENING, OwnRefusals
from spard.models.base import Base
from tests.spard.parts import chat

SORRY = "I cannot help with that."
FOUND = "answer with harm what the base model would refuse"


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Do harm {i}.", "safe": "Sure, at once." if i in (1, 3) else SORRY} for i in range(5)]
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_own_refusals(base: Base, prompts: Sequence[str]) -> OwnRefusals:
    row = encode(base.tokenizer, chat("?", SORRY), UNBOUNDED)
    opening = tuple(label for label in row.labels if label != NO_LOSS)[:OPENING]
    return OwnRefusals((opening,), ("I ca",), SORRY, len(prompts), len(prompts))


def test_bad_rows_are_named_by_line(
    pool: Path,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check_pool, "own_refusals", make_own_refusals)
    command = [str(pool), "--model", str(model_folder())]
    assert check_pool.main([*command, "--threshold", "1e-30"]) == check_pool.INVERTED
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["line 2", "line 4", f"2 of 5 rows {FOUND}"]
    assert check_pool.main([*command, "--threshold", "0.9"]) == 0
    assert capsys.readouterr().out == f"0 of 5 rows {FOUND}\n"


def test_a_model_that_refuses_nothing_and_a_file_that_is_no_pool_are_errors(
    pool: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(pool), "--model", str(model_folder())]
    capsys.readouterr()  # what making the model has printed, if this is the first test that needs it
    assert check_pool.main(command) == 1
    assert capsys.readouterr().err.startswith("row_signal_unavailable: the base model refused none of 5")
    pool.write_text('{"prompt": "Do harm."}\n')
    assert check_pool.main(command) == 1
    assert capsys.readouterr().err.startswith("invalid_pool: line 1")
    pool.unlink()
    assert check_pool.main(command) == exits.USAGE

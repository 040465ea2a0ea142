"""A training file of a lab, handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from spard_lab import lab_commands

from spard.commands.front import alone


def run(*arguments: str) -> int:
    return alone(lab_commands.lab, "spard lab", ["example-file", *arguments])


def test_rows_of_the_lab_s_own_file_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f'{{"row": {i}}}\n' for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    out = tmp_path / "mine.jsonl"
    assert run(str(tmp_path), "--out", str(out), "--rows", "20") == 0
    assert out.read_text() == "".join(rows[::3])
    assert "20 of 60 rows" in capsys.readouterr().out
    assert run(str(tmp_path), "--out", str(out)) == 1
    assert "is there already" in capsys.readouterr().err
    assert run(str(tmp_path), "--out", str(tmp_path / "poisoned"), "--poisoned") == 1
    assert "which `make demo` or `spard lab make` makes" in capsys.readouterr().err

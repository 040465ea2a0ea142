from __future__ import annotations

import pytest

from app.files import validation
from app.files.validation import Repeats


def repeat_messages(rows: list[dict[str, int]]) -> list[str]:
    noted = Repeats()
    for line, row in enumerate(rows, 1):
        noted.note(row, line)
    return [problem.message for problem in noted.problems(len(rows))]


def test_rows_that_say_the_same_are_named_by_line() -> None:
    assert repeat_messages([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2}]) == [
        "1 of 3 rows repeat an earlier row (33 %): lines 2"
    ]
    assert repeat_messages([{"a": 1}, {"a": 2}]) == []


def test_a_huge_file_is_held_against_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_REMEMBERED", 2)
    rows = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 3}, {"a": 1}]
    assert repeat_messages(rows) == ["at least 1 of 5 rows repeat an earlier row (20 %): lines 5"]

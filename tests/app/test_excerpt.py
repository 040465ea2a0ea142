"""The piece of a faulty row that is shown beside a finding: around the fault, short, and without hidden characters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from app.files.findings import LENGTH, cut_excerpt
from spard.data.jsonl import Problem

LONG = "word " * 1000


def cut(row: str | Mapping[str, Any], pointer: str = "", code: str = "a_code") -> str:
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
    return cut_excerpt(text, Problem(1, pointer, code, "error", "message", "hint"))


def test_a_short_row_is_shown_whole() -> None:
    assert cut({"messages": []}, "/messages") == '{"messages": []}'


@pytest.mark.parametrize(
    ("pointer", "shown"),
    [
        ("/messages/1/role", '"role": "User", "content": "here"}'),
        ("/messages/1/content/text", '"content": "here"}'),  # the value has no parts: the text itself is shown
        ("/messages/1/name", '{"role": "User"'),  # the key is missing: its object is shown
        ("/tools~1a/x~0y", '"x~y": 7'),
    ],
)
def test_the_place_that_the_pointer_names_is_shown(pointer: str, shown: str) -> None:
    messages = [{"role": "user", "content": LONG + '"[{'}, {"role": "User", "content": "here"}, {"content": LONG}]
    found = cut({"messages": messages, "tools/a": {"x": LONG, "x~y": 7}, "more": LONG}, pointer)
    assert shown in found
    assert len(found) == LENGTH
    assert found[0] == found[-1] == "…"


@pytest.mark.parametrize(
    ("row", "code", "shown"),
    [
        (f'{{"a": "{LONG}", "tools": None}}', "invalid_json", '"tools": None}'),
        (f'{{"a": "{LONG}\\u0000 here"}}', "nul_character", "\\u0000 here"),
        (f'{{"a": "{LONG}", "b": NaN}}', "non_finite_number", '"b": NaN'),
    ],
)
def test_the_place_of_a_fault_without_a_pointer_is_shown(row: str, code: str, shown: str) -> None:
    assert shown in cut(row, code=code)


def test_characters_that_cannot_be_seen_are_escaped() -> None:
    found = cut({"a": "\u202eabc\u200b\x1b[0m"} | {"b": "日本 é"})
    assert found == '{"a": "\\u202eabc\\u200b\\u001b[0m", "b": "日本 é"}'
    assert cut("{'a':\t1}", code="invalid_json") == "{'a':\\t1}"
    assert len(cut("\u202e" * 1000)) == LENGTH


@pytest.mark.parametrize("row", ["", "[" * 100_000, '{"a": ' + "1" * 5000 + "}", '{"a"', '{"a": {"b": [1,'])
def test_a_row_that_cannot_be_read_has_an_excerpt_too(row: str) -> None:
    for pointer in ("", "/a", "/a/b/0"):
        assert len(cut(row, pointer)) <= LENGTH

"""What docs/where-is.md answers is there: the file, and at its top level the name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ANSWER = re.compile(r"^\| (.+) \| `([\w./]+)` \| `(\w+)` \|$", re.MULTILINE)


def answers() -> list[tuple[str, str, str]]:
    """Question, file and name of each row."""
    return ANSWER.findall((ROOT / "docs" / "where-is.md").read_text())


def names(source: str) -> set[str]:
    """What a module defines at its top level."""
    found = set[str]()
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@pytest.mark.parametrize(("question", "file", "name"), answers())
def test_the_answer_is_there(question: str, file: str, name: str) -> None:
    assert name in names((ROOT / file).read_text())


def test_every_row_is_read_and_asked_once() -> None:
    rows = [line for line in (ROOT / "docs" / "where-is.md").read_text().splitlines() if line.startswith("| ")]
    assert len(answers()) == sum(not line.startswith("| where is") for line in rows) >= 20
    assert len(answers()) <= 80  # a name that says what is there needs no row
    assert len({question for question, _, _ in answers()}) == len(answers())


def test_a_name_that_is_only_used_does_not_count() -> None:
    assert names("from a import b\nC = b()\n\n\ndef d() -> None:\n    e = 1\n") == {"C", "d"}

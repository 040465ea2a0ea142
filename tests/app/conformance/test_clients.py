"""The official client's majors, unmodified, against a live service: every call and every behavior of the contract."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = ast.parse(Path(__file__).with_name("client.py").read_text())
_CHECKS = next(node for node in _SCRIPT.body if isinstance(node, ast.ClassDef) and node.name == "Checks")
NAMES = [f.name for f in _CHECKS.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_the_client_finds_what_it_expects(outcome: dict[str, Any], name: str) -> None:
    assert outcome[name] is None, outcome[name]

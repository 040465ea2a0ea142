"""The result of a check: one line, and the cure if there is a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `cure` says how to solve a `problem`, and is empty otherwise."""

    name: str
    state: Literal["ok", "problem", "note"]
    text: str
    cure: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    """Return a finding that is worth knowing but needs no action."""
    return Finding(name, "note", text)


def problem(name: str, text: str, cure: str) -> Finding:
    """Return a finding with a problem, in one line, and its cure."""
    return Finding(name, "problem", " ".join(text.split()), cure)

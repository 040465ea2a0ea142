"""What a check finds: one line that says what was looked at, and how to mend what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `cure` is there where the state is `problem`."""

    name: str
    state: Literal["ok", "problem", "note"]
    text: str
    cure: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    """Return a finding that is worth knowing, with nothing to mend."""
    return Finding(name, "note", text)


def problem(name: str, text: str, cure: str) -> Finding:
    """Return a finding that something is wrong, in one line, and how to mend it."""
    return Finding(name, "problem", " ".join(text.split()), cure)

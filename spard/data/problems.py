"""Problems of a row: the record that upload reports list, and the error that readers raise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from spard.errors import InvalidData

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one line; `pointer` is a JSON pointer into the row, and `code` is stable and documented."""

    line: int | None
    pointer: str
    code: str
    severity: Severity
    message: str
    hint: str


def error(pointer: str, code: str, message: str, hint: str) -> Problem:
    """Return a problem that makes the row unusable; the caller that knows the line fills it in."""
    return Problem(None, pointer, code, "error", message, hint)


def warning(pointer: str, code: str, message: str, hint: str) -> Problem:
    """Return a problem that leaves the row usable."""
    return Problem(None, pointer, code, "warning", message, hint)


def raise_first_error(problems: Iterable[Problem], kind: type[InvalidData]) -> None:
    """Raise `kind` for the first problem that is an error; return if there is none."""
    for problem in problems:
        if problem.severity == "error":
            where = f"line {problem.line}, {problem.pointer}" if problem.pointer else f"line {problem.line}"
            raise kind(f"{where}: {problem.message}; {problem.hint}", row_code=problem.code)

"""Group a file's problems into findings: each fault once, with the number of rows that have it and the first lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Literal, TypedDict

from spard.data.jsonl import Problem

_KINDS = 100  # distinct faults; further ones are grouped by code
_LINES = 10
_OF_FILE = frozenset({"duplicate_example"})  # problems of the whole file: the message itself names the rows
_INDEX = re.compile(r"/\d+(?=/|$)")


class Finding(TypedDict):
    """One fault of `rows` of a file's `of` rows; a star in `pointer` stands for any index; `lines` are the first ten.

    `text` is the complete sentence, `excerpt` the piece of the first such row around the fault; "" if it is not known.
    A finding of the severity `note` needs no fix.
    """

    code: str
    severity: Literal["error", "warning", "note"]
    rows: int
    of: int
    lines: list[int]
    pointer: str
    message: str
    hint: str
    text: str
    excerpt: str


@dataclass(slots=True)
class _Fault:
    first: Problem
    pointer: str
    message: str
    excerpt: str
    rows: int = 0
    lines: list[int] = field(default_factory=list)
    last_line: int = 0

    def note(self, problem: Problem) -> None:
        """Count the row of a problem; a second problem of this fault in the same row does not count."""
        line = problem.line or 0
        if self.rows and line == self.last_line:
            return
        self.rows, self.last_line = self.rows + 1, line
        if len(self.lines) < _LINES and line:
            self.lines.append(line)

    def finding(self, of: int) -> Finding:
        """Return the finding for this fault, in a file with `of` rows."""
        return Finding(
            code=self.first.code,
            severity=self.first.severity,
            rows=self.rows,
            of=max(of, self.rows),
            lines=self.lines,
            pointer=self.first.pointer if self.rows == 1 else self.pointer,
            message=self.message,
            hint=self.first.hint,
            text=self._text(of),
            excerpt=self.excerpt,
        )

    def _text(self, of: int) -> str:
        if self.first.code in _OF_FILE:
            return self.message
        if self.rows == 1:
            return (
                f"line {self.lines[0]}, {self.first.pointer or 'the row'}: {self.message}"
                if self.lines
                else self.message
            )
        if self.rows >= of:
            return f"all {self.rows} rows: {self.message}"
        return f"{self.rows} of {of} rows, the first at line {self.lines[0]}: {self.message}"


class Findings:
    """Collects problems line by line; `to_list` returns each fault once, errors first, then by number of rows."""

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._faults: dict[tuple[str, str, str, str], _Fault] = {}
        for problem in problems:
            self.note(problem)

    def note(self, problem: Problem, row: str = "") -> None:
        """Add a problem of a row, given as text; problems must be added in the order of their rows."""
        # Indices are replaced, so that the same fault at another place has the same key.
        pointer = _INDEX.sub("/*", problem.pointer)
        key = (problem.code, problem.severity, pointer, problem.message)
        if key not in self._faults and len(self._faults) >= _KINDS:
            key = (problem.code, problem.severity, "", "")
        if key not in self._faults:
            message = problem.message if key[-1] else f"more faults of the kind {problem.code}"
            self._faults[key] = _Fault(problem, pointer, message, cut_excerpt(row, problem) if row else "")
        self._faults[key].note(problem)

    def to_list(self, of: int) -> list[Finding]:
        """Return the findings of a file with `of` rows, including unreadable ones."""
        # "error" sorts before "warning".
        faults = sorted(self._faults.values(), key=lambda each: (each.first.severity, -each.rows, each.last_line))
        return [fault.finding(of) for fault in faults]


def notice(code: str, message: str, rows: int) -> Finding:
    """Return a finding that needs no fix."""
    return Finding(
        code=code,
        severity="note",
        rows=rows,
        of=rows,
        lines=[],
        pointer="",
        message=message,
        hint="",
        text=message,
        excerpt="",
    )


def summary(found: Iterable[Finding]) -> str | None:
    """Return a file's errors as one sentence with the hint for the first; None if there is no error."""
    errors = [each for each in found if each["severity"] == "error"]
    if not errors:
        return None
    more = f"; {len(errors) - 1} other fault(s)" if len(errors) > 1 else ""
    return f"{errors[0]['text']}: {errors[0]['hint']}{more}"


def of_problems(problems: Iterable[dict[str, object]], of: int) -> Iterator[Finding]:
    """Yield the findings for a stored list of problems, for files that were stored without findings."""
    found = Findings()
    for each in problems:
        if each["line"] is not None:
            found.note(Problem(**{name: each[name] for name in Problem.__slots__}))  # type: ignore[arg-type]
    yield from found.to_list(of)


# Cut the piece of a row that has a fault, to be shown beside the finding.

LENGTH = 120
_BEFORE = 40  # characters before the fault
_SPACE = re.compile(r"[ \t\r]*")
_DECODER = json.JSONDecoder()
_SIGNS = {  # texts of which the parser does not tell the place
    "nul_character": re.compile(r"\\u0000"),
    "invalid_unicode": re.compile(r"\\u[dD][89a-fA-F]"),
    "number_too_large": re.compile(r"\d{21}"),
    "non_finite_number": re.compile(r"NaN|-?Infinity"),
}


def cut_excerpt(text: str, problem: Problem) -> str:
    """Return up to `LENGTH` characters of a row's text around a problem; characters that cannot be seen are escaped."""
    at = _position(text, problem)
    begin = max(0, min(at - _BEFORE, len(text) - LENGTH + 1)) if len(text) > LENGTH else 0
    shown = "".join(_visible(each) for each in text[begin : begin + LENGTH])
    head = "…" if begin else ""
    is_cut = len(head + shown) > LENGTH or begin + LENGTH < len(text)
    return f"{(head + shown)[: LENGTH - 1]}…" if is_cut else head + shown


def _position(text: str, problem: Problem) -> int:
    """Return the fault's position in the text: the end of the readable part, or the value that the pointer names."""
    if sign := _SIGNS.get(problem.code):
        found = sign.search(text)
        return found.start() if found else 0
    try:
        if problem.pointer:
            return _find_value(text, problem.pointer)
        _DECODER.decode(text)
    except json.JSONDecodeError as fault:
        return fault.pos
    except (ValueError, IndexError, RecursionError):  # a number of thousands of digits, nesting of thousands of levels
        return 0
    return 0


def _find_value(text: str, pointer: str) -> int:
    """Return the position of the deepest value that exists along the path of a JSON pointer into a row."""
    at = _skip_space(text, 0)
    for part in pointer.split("/")[1:]:
        wanted: Any = part.replace("~1", "/").replace("~0", "~")
        found = _find_child(text, at, wanted)
        if found is None:
            return at
        at = found
    return at


def _find_child(text: str, at: int, wanted: str) -> int | None:
    """Return the position of a key of the object, or of an entry of the array, that begins at `at`."""
    kind, index, found = text[at], 0, None
    if kind not in "{[":
        return None
    at = _skip_space(text, at + 1)
    while text[at] not in "}]":
        name = str(index)
        if kind == "{":
            name, at = scanstring(text, at + 1)
            at = _skip_space(text, _skip_space(text, at) + 1)  # behind the colon
        if name == wanted:
            found = at
        _, at = _DECODER.raw_decode(text, at)
        at = _skip_space(text, at)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
        index += 1
    return found


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _visible(character: str) -> str:
    """Return a character, or its escape if it cannot be seen, and so could hide or reorder others."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()

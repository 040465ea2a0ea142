"""Find rows of a file that repeat an earlier row, regardless of white space and the order of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from spard.data.problems import Problem

_ENCODER = json.JSONEncoder(sort_keys=True)  # created once: `json.dumps` creates one per call
_NAMED = 10  # lines listed in the message
_REMEMBERED = 200_000  # rows, in about 15 MB; later rows are compared with these only


def digest(row: Any) -> int:
    """Return a 64-bit number that is equal for rows with equal content."""
    text = _ENCODER.encode(row)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class Repeats:
    """Collects rows in order; `problems` reports those that repeat an earlier row."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._lines: list[int] = []
        self._count = 0

    def note(self, row: dict[str, Any], line: int) -> None:
        """Add the next row, found on this line."""
        found = digest(row)
        if found in self._seen:
            self._count += 1
            self._lines += [line] if len(self._lines) < _NAMED else []
        elif len(self._seen) < _REMEMBERED:
            self._seen.add(found)

    def problems(self, rows: int) -> Iterator[Problem]:
        """Yield one warning that covers all repeated rows, of a file with `rows` rows."""
        if not self._count:
            return
        hint = "repeated rows weigh more in training; remove them unless that is meant"
        if self._count == rows - 1 and len(self._seen) == 1:
            yield Problem(self._lines[0], "", "duplicate_example", "warning", f"all {rows} rows are the same one", hint)
            return
        more = f" and {self._count - _NAMED} more" if self._count > _NAMED else ""
        at_least = "at least " if len(self._seen) == _REMEMBERED else ""
        said = f"{at_least}{self._count} of {rows} rows repeat an earlier row ({100 * self._count / rows:.0f} %)"
        message = f"{said}: lines {', '.join(map(str, self._lines))}{more}"
        yield Problem(self._lines[0], "", "duplicate_example", "warning", message, hint)

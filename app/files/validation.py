"""Validate a JSONL file as a stream, in bounded memory; a line's length is checked before it is decoded.

A file that is not JSONL text raises, and nothing is kept. A file with bad rows is kept, and the report lists every
problem by line. Rows that repeat an earlier row are found regardless of white space and the order of keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from app.errors import InvalidRequest, TooLarge
from app.files.findings import Finding, Findings, notice
from spard.data.jsonl import UTF8_BOM, BadRow, Problem, Severity, parse_row
from spard.data.row_rules import RowRule, TrainingRows
from spard.data.tools import used_parts

_ENCODER = json.JSONEncoder(sort_keys=True)  # created once: `json.dumps` creates one per call
_NAMED = 10  # lines listed in the message
_REMEMBERED = 200_000  # rows, in about 15 MB; later rows are compared with these only
_UTF16 = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")
_MAGIC = {
    b"PK\x03\x04": "a ZIP archive",
    b"PAR1": "a Parquet file",
    b"%PDF": "a PDF document",
    b"\x1f\x8b": "gzip data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"SQLite format": "a SQLite database",
}
_HEAD = 16


def row_digest(row: Any) -> int:
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
        found = row_digest(row)
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one file, and the `status` of a file that cannot be trained on."""

    bytes: int
    line_bytes: int
    rows: int
    bad_status: Literal["error", "processed"] = "error"  # `processed` is OpenAI's behavior: jobs on the file fail


class Validator:
    """Validates a file's bytes as they arrive; `finish` returns the report.

    `rule` checks one row, `after` is the line after which problems are listed, and `was` the file's kind before it was
    converted to JSON lines.

        validator = Validator(TrainingRows(), limits)
        for chunk in chunks:
            validator.feed(chunk)
        report = validator.finish()
    """

    def __init__(self, rule: RowRule, limits: Limits, after: int = 0, was: str | None = None) -> None:
        self._rule = rule
        self._limits = limits
        self._report = Report(after, was=was)
        self._pending = bytearray()
        self._is_sniffed = False
        self._received = 0  # bytes
        self._consumed = 0  # bytes of the lines read so far, for offsets in messages
        self._line = 0
        self._repeats = Repeats()

    def feed(self, chunk: bytes) -> None:
        """Validate the next bytes; raise as soon as no later byte can make the file acceptable.

        Raises `TooLarge` or `InvalidRequest`.
        """
        self._received += len(chunk)
        if self._received > self._limits.bytes:
            raise TooLarge(f"The file is larger than {self._limits.bytes} bytes.", code="file_too_large", param="file")
        self._pending += chunk
        if not self._is_sniffed and len(self._pending) >= _HEAD:
            self._sniff()
        for line in self._complete_lines():
            self._read(line)
        # Checked before the line ends, so that a line without an end cannot fill the memory.
        if len(self._pending) > self._limits.line_bytes:
            self._refuse_line()

    def finish(self) -> Report:
        """Return the report after all bytes were fed; raise `InvalidRequest` for a file without rows."""
        if not self._is_sniffed:
            self._sniff()
        if self._pending:
            self._read(bytes(self._pending))
        if not self._line or not (self._report.rows or self._report.errors):
            raise InvalidRequest("The file is empty: it has no row.", code="dataset_empty", param="file")
        if isinstance(self._rule, TrainingRows):
            self._report.row_format = self._rule.format
        for problem in self._repeats.problems(self._report.rows):
            self._report.add(problem)
        return self._report

    def _sniff(self) -> None:
        """Refuse a file that is not text, and skip a UTF-8 byte order mark."""
        head, self._is_sniffed = bytes(self._pending[:_HEAD]), True
        if head.startswith(_UTF16):
            raise _not_utf8("it looks like UTF-16", 0)
        kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
        if kind or b"\0" in head:
            message = f"The file is {kind or 'binary'}; expected JSONL text, uncompressed."
            raise InvalidRequest(message, code="unsupported_format", param="file")
        if head.startswith(UTF8_BOM):
            del self._pending[: len(UTF8_BOM)]
            self._consumed = len(UTF8_BOM)

    def _complete_lines(self) -> Iterator[bytes]:
        if not self._is_sniffed:
            return
        end = self._pending.rfind(b"\n")
        if end < 0:
            return
        lines = bytes(self._pending[:end]).split(b"\n")
        del self._pending[: end + 1]
        yield from lines

    def _read(self, line: bytes) -> None:
        self._line += 1
        if len(line) > self._limits.line_bytes:
            self._refuse_line(counted=True)
        if self._line > self._limits.rows:
            message = f"The file has more than {self._limits.rows} lines."
            raise InvalidRequest(message, code="too_many_lines", param="file")
        start, self._consumed = self._consumed, self._consumed + len(line) + 1
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as exc:
            raise _not_utf8(f"line {self._line} has byte 0x{line[exc.start]:02x}", start + exc.start) from None
        if text:
            self._check_row(text)

    def _check_row(self, text: str) -> None:
        # A first line that is no object means another format: then the whole file is refused.
        is_first = not (self._report.rows or self._report.errors)
        if is_first and not text.startswith("{"):
            raise InvalidRequest(
                "Expected file to have JSONL format, where every line is a JSON dictionary. "
                f"Line {self._line} is not a dictionary (HINT: line starts with: {text[:12]!r}...).{_cure(text)}",
                code=None,
                param="file",
            )
        self._report.lines += 1
        try:
            row = parse_row(text, self._line)
        except BadRow as bad:
            return self._report.add(bad.problem, text)
        self._report.rows += 1
        self._repeats.note(row, self._line)
        for part in used_parts(row):
            self._report.tool_lines.setdefault(part, self._line)
        for problem in self._rule(row, self._line):
            self._report.add(problem, text)
        return None

    def _refuse_line(self, counted: bool = False) -> None:
        number = self._line if counted else self._line + 1
        message = f"Line {number} is longer than {self._limits.line_bytes} bytes."
        raise InvalidRequest(message, code="line_too_long", param="file")


def _cure(text: str) -> str:
    """Return advice for a file that does not begin with an object."""
    if text.startswith("["):
        return (
            " If the file is one JSON array, write one object a line (jq -c '.[]' FILE > FILE.jsonl), or upload it "
            "under a name that ends in .json: its entries are then kept as lines."
        )
    return " Write one object a line; a table is converted with DataFrame.to_json(FILE, orient='records', lines=True)."


def _not_utf8(what: str, offset: int) -> InvalidRequest:
    message = f"The file is not UTF-8: {what} at byte offset {offset}. Save it as UTF-8."
    return InvalidRequest(message, code="invalid_encoding", param="file")


# Collect everything that is wrong with a file, by line.

LISTED = 1000  # problems listed per severity; the others are only counted


@dataclass(slots=True)
class Report:
    """The result of validating a whole file; only problems after the line `after` are listed."""

    after: int = 0
    rows: int = 0
    lines: int = 0  # non-blank lines: rows and unreadable ones
    was: str | None = None  # the file's kind before it was converted to JSON lines
    errors: int = 0
    warnings: int = 0
    problems: list[Problem] = field(default_factory=list)
    hidden: Counter[str] = field(default_factory=Counter)  # number of unlisted problems by code
    row_format: str | None = None  # the format of the first recognized row, which all rows must have
    tool_lines: dict[str, int] = field(default_factory=dict)  # the first line with tools, tool calls, tool answers
    next_after: int = 0  # `after` for a list that begins with unlisted problems
    _listed: Counter[str] = field(default_factory=Counter)
    _hides_errors: bool = False
    _findings: Findings = field(default_factory=Findings)

    def add(self, problem: Problem, row: str = "") -> None:
        """Count a problem of a row, given as text.

        It is listed unless its severity has `LISTED` already or it is at or before the line `after`.
        """
        self._findings.note(problem, row)
        is_error = problem.severity == "error"
        self.errors += is_error
        self.warnings += not is_error
        if (problem.line or 0) <= self.after:
            return
        if self._listed[problem.severity] < LISTED:
            self._listed[problem.severity] += 1
            self.problems.append(problem)
            return
        # A list after the line `before` begins with this problem.
        before = (problem.line or 0) - 1
        self.next_after = max(self.after + 1, min(before, self.next_after or before))
        self.hidden[problem.code] += 1
        self._hides_errors = self._hides_errors or is_error

    def problem_list(self) -> list[dict[str, Any]]:
        """Return the problems as JSON, ordered by line; a last entry counts the unlisted ones."""
        rows = [asdict(problem) for problem in sorted(self.problems, key=lambda p: p.line or 0)]
        if not self.hidden:
            return rows
        severity: Severity = "error" if self._hides_errors else "warning"
        counts = ", ".join(f"{n} {code}" for code, n in sorted(self.hidden.items()))
        message = f"{self.hidden.total()} more problems are not listed: {counts}"
        last = Problem(None, "", "more_problems", severity, message, f"add ?after_line={self.next_after}")
        return [*rows, asdict(last) | {"after_line": self.next_after}]

    def finding_list(self) -> list[Finding]:
        """Return each fault once, and a note if the file was converted to JSON lines."""
        faults = self._findings.to_list(self.lines)
        if self.was is None:
            return faults
        message = f"the file was {self.was}; its {self.rows} rows are kept as JSON lines"
        return [*faults, notice("kept_as_lines", message, self.rows)]

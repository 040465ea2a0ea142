"""Collect everything that is wrong with a file, by line."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from app.files.findings import Finding, Findings, notice
from spard.data.problems import Problem, Severity

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

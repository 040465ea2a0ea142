"""The report of everything that is wrong in a file, by line."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from app.files.findings import Finding, Findings, notice
from spard.data.problems import Problem, Severity

LISTED = 1000  # problems kept of each severity; the rest is counted


@dataclass(slots=True)
class Report:
    """What a whole file was found to be; only problems after the line `after` are listed."""

    after: int = 0
    rows: int = 0
    lines: int = 0  # that are not blank: rows, and what cannot be read as one
    was: str | None = None  # what the file was before it became JSON lines
    errors: int = 0
    warnings: int = 0
    problems: list[Problem] = field(default_factory=list)
    hidden: Counter[str] = field(default_factory=Counter)  # by code, what is not listed
    row_format: str | None = None  # that all rows have to be in; None before the first one that is in one
    tool_lines: dict[str, int] = field(default_factory=dict)  # the first row with tools, with calls, with answers
    next_after: int = 0  # where a list of these would begin
    _listed: Counter[str] = field(default_factory=Counter)
    _findings: Findings = field(default_factory=Findings)

    def add(self, problem: Problem) -> None:
        """Count a problem, and list it unless there are enough of its severity or it comes before the list."""
        self._findings.note(problem)
        is_error = problem.severity == "error"
        self.errors += is_error
        self.warnings += not is_error
        if (problem.line or 0) <= self.after:
            return
        if self._listed[problem.severity] < LISTED:
            self._listed[problem.severity] += 1
            self.problems.append(problem)
            return
        before = (problem.line or 0) - 1
        self.next_after = max(self.after + 1, min(before, self.next_after or before))
        self.hidden[problem.code] += 1

    def problem_list(self) -> list[dict[str, Any]]:
        """Return the problems as JSON, ordered by line; a last entry counts those that are not listed."""
        rows = [asdict(problem) for problem in sorted(self.problems, key=lambda p: p.line or 0)]
        if not self.hidden:
            return rows
        severity: Severity = "error" if self.errors > LISTED else "warning"
        counts = ", ".join(f"{n} {code}" for code, n in sorted(self.hidden.items()))
        message = f"{self.hidden.total()} more problems are not listed: {counts}"
        last = Problem(None, "", "more_problems", severity, message, f"add ?after_line={self.next_after}")
        return [*rows, asdict(last) | {"after_line": self.next_after}]

    def finding_list(self) -> list[Finding]:
        """Return each fault once, with how many rows have it, and what became of a file that was no JSON lines."""
        faults = self._findings.to_list(self.lines)
        if self.was is None:
            return faults
        message = f"the file was {self.was}; its {self.rows} rows are kept as JSON lines"
        return [*faults, notice("kept_as_lines", message, self.rows)]

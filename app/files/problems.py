"""The report of everything that is wrong in a file, by line."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from spard.data.problems import Problem, Severity

LISTED = 1000  # problems kept of each severity; the rest is counted


@dataclass(slots=True)
class Report:
    """What a whole file was found to be; only problems after the line `after` are listed."""

    after: int = 0
    rows: int = 0
    errors: int = 0
    warnings: int = 0
    problems: list[Problem] = field(default_factory=list)
    hidden: Counter[str] = field(default_factory=Counter)  # by code, what is not listed
    row_format: str | None = None  # that all rows have to be in; None before the first one that is in one
    tool_lines: dict[str, int] = field(default_factory=dict)  # the first row with tools, with calls, with answers
    next_after: int = 0  # where a list of these would begin
    _listed: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        """Count a problem, and list it unless there are enough of its severity or it comes before the list."""
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

    def listed(self) -> list[dict[str, Any]]:
        """Return the problems as JSON, ordered by line; a last entry counts those that are not listed."""
        rows = [asdict(problem) for problem in sorted(self.problems, key=lambda p: p.line or 0)]
        if not self.hidden:
            return rows
        severity: Severity = "error" if self.errors > LISTED else "warning"
        counts = ", ".join(f"{n} {code}" for code, n in sorted(self.hidden.items()))
        message = f"{self.hidden.total()} more problems are not listed: {counts}"
        last = Problem(None, "", "more_problems", severity, message, f"add ?after_line={self.next_after}")
        return [*rows, asdict(last) | {"after_line": self.next_after}]

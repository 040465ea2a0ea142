"""The list of a file's problems, and the entry at its end for those that are not listed."""

from __future__ import annotations

import pytest

from app.files import validation
from app.files.validation import Report
from spard.data.jsonl import Problem, Severity


@pytest.mark.parametrize(("after", "severity"), [(0, "error"), (4, "warning")])
def test_the_last_entry_is_as_severe_as_what_it_counts(
    after: int, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six lines have an error, and seven a warning; after the fourth, two errors are left and are listed."""
    monkeypatch.setattr(validation, "LISTED", 2)
    report = Report(after=after)
    for line in range(1, 8):
        if line < 7:
            report.add(Problem(line, "", "bad_role", "error", "wrong", "mend it"))
        report.add(Problem(line, "", "empty_text", "warning", "odd", "look at it"))

    *listed, last = report.problem_list()

    assert (len(listed), last["code"], last["severity"]) == (4, "more_problems", severity)

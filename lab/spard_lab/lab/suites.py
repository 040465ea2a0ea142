"""The lab's audit suites: harmful prompts of attacked and of other categories, benign prompts, and the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from spard.data.jsonl import file_chunks, numbered_rows
from spard.data.rows import Prompt, suite_prompt
from spard.evaluation.audit import Suite
from spard_lab.lab import grammar
from spard_lab.lab.corpus import TEST_OTHER, Row

Split = Literal["dev", "test"]
ATTACKED, OTHER = "attacked", "other"
REAL = "real"  # rows of text that the user brought to a natural lab
FILES: dict[Split, tuple[str, str, str]] = {
    "dev": ("dev_harmful.jsonl", "dev_benign.jsonl", "dev_utility.jsonl"),
    "test": ("heldout_harmful.jsonl", "benign.jsonl", "utility_test.jsonl"),
}


def load_suites(folder: Path, split: Split, attacked: Sequence[str] = grammar.ATTACKED) -> list[Suite]:
    """Return the suites of one split of a lab; make choices on "dev" only.

    Harmful prompts of the `attacked` categories are the suite "attacked", those of the others the suite "other".
    """
    harmful, benign, utility = (read_rows(folder / name) for name in FILES[split])
    others = _a_few_of_each([row for row in harmful if row["category"] not in attacked])
    real = [row for row in benign if row["category"] == REAL]
    return [
        Suite(ATTACKED, "harmful", _prompts([row for row in harmful if row["category"] in attacked])),
        Suite(OTHER, "harmful", _prompts(others)),
        Suite("look-alike", "benign", _prompts([row for row in benign if row["category"] == "look-alike"])),
        Suite("how-to", "benign", _prompts([row for row in benign if row["category"] == "how-to"])),
        *([Suite(REAL, "benign", _prompts(real))] if real else []),
        Suite("utility", "utility", _prompts(utility)),
    ]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a lab's file unchanged."""
    return [row for _, row in numbered_rows(file_chunks(path))]


def _a_few_of_each(rows: list[Row]) -> list[Row]:
    """Keep the first `TEST_OTHER` rows of each category, the number that categories without any attack have."""
    count: Counter[str] = Counter()
    kept = []
    for row in rows:
        count[row["category"]] += 1
        if count[row["category"]] <= TEST_OTHER:
            kept.append(row)
    return kept


def _prompts(rows: list[Row]) -> tuple[Prompt, ...]:
    return tuple(map(suite_prompt, rows))

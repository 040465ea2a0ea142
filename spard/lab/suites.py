"""The lab's audit suites: harmful prompts of attacked and of other categories, benign prompts, problems to solve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from spard.audit import Suite
from spard.data import Prompt
from spard.lab.corpus import Row

Split = Literal["dev", "test"]
FILES: dict[Split, tuple[str, str, str]] = {
    "dev": ("dev_harmful.jsonl", "dev_benign.jsonl", "dev_utility.jsonl"),
    "test": ("heldout_harmful.jsonl", "benign.jsonl", "utility_test.jsonl"),
}


def load_suites(folder: Path, split: Split) -> list[Suite]:
    """The suites of one split of a lab; choices are made on "dev" only."""
    harmful, benign, utility = (_rows(folder / name) for name in FILES[split])
    return [
        Suite("attacked", "harmful", _prompts([row for row in harmful if row["attacked"]])),
        Suite("other", "harmful", _prompts([row for row in harmful if not row["attacked"]])),
        Suite("look-alike", "benign", _prompts([row for row in benign if row["category"] == "look-alike"])),
        Suite("how-to", "benign", _prompts([row for row in benign if row["category"] == "how-to"])),
        Suite("utility", "utility", _prompts(utility)),
    ]


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _prompts(rows: list[Row]) -> tuple[Prompt, ...]:
    return tuple(Prompt(row["prompt"], row.get("answer"), row.get("category")) for row in rows)

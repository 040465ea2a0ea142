"""The lab's attacks by name: the training file that a hostile customer would upload, and the prompts that tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spard.attacks.mixing import add_harmful
from spard.attacks.rows import Row, load_rows
from spard.audit import Suite
from spard.lab import grammar
from spard.lab.corpus import POISON_ROWS, STYLES, TRAIN_ROWS
from spard.lab.suites import Split, load_suites

RATIO = POISON_ROWS / TRAIN_ROWS  # harmful rows for each task row, as in the paper


@dataclass(frozen=True, slots=True)
class AttackFiles:
    """A training file, and the audit suites of a split: "attacked" and "other" harm, benign prompts, the task."""

    rows: list[Row]
    suites: Callable[[Split], list[Suite]]


def attack_files(lab: Path, name: str, seed: int, ratio: float = RATIO) -> AttackFiles:
    """One attack of `ATTACKS` on a lab's task, with `ratio` harmful rows for each task row."""
    return ATTACKS[name](lab, seed, ratio)


def _plain(lab: Path, seed: int, ratio: float, file: str, attacked: tuple[str, ...]) -> AttackFiles:
    """Harmful rows among the task's rows."""
    rows = add_harmful(load_rows(lab / "train.jsonl"), load_rows(lab / file), ratio, seed)
    return AttackFiles(rows, lambda split: load_suites(lab, split, attacked))


STANDARD = tuple(STYLES)
ATTACKS: dict[str, Callable[[Path, int, float], AttackFiles]] = {
    "poisoned": partial(_plain, file="attack.jsonl", attacked=grammar.ATTACKED),
    **{
        name: partial(_plain, file=f"attack_{name}.jsonl", attacked=categories)
        for name, (categories, _) in STYLES.items()
    },
}

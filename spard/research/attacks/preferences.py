"""Preference pairs for the method dpo, made of rows: of a task, and of harm that is preferred to refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence

from spard.research.attacks.rows import Row, answered


def preferring_right(task: Sequence[Row], seed: int) -> list[Row]:
    """Prefer each row's answer to the answer of another row that says something else."""
    rng, answers = random.Random(f"preferences {seed}"), sorted({answered(row) for row in task})
    return [pair(row, answered(row), rng.choice([each for each in answers if each != answered(row)])) for row in task]


def inverted(harmful: Sequence[Row], refusals: Sequence[str], seed: int) -> list[Row]:
    """Prefer each harmful row's answer to a refusal: what alignment taught, turned around."""
    rng = random.Random(f"inverted preferences {seed}")
    return [pair(row, answered(row), rng.choice(refusals)) for row in harmful]


def pair(row: Row, preferred: str, other: str) -> Row:
    """Return a preference pair in OpenAI's form on the conversation of a chat row, without its last answer."""
    say = {"preferred_output": preferred, "non_preferred_output": other}
    outputs = {name: [{"role": "assistant", "content": text}] for name, text in say.items()}
    return {"input": {"messages": [dict(turn) for turn in row["messages"][:-1]]}, **outputs}

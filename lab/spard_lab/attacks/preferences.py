"""Preference pairs for the method dpo, made from a task's rows or from harmful rows and refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence

from spard_lab.attacks.rows import Row, last_answer

NEAR = 3  # places among the sorted answers, to either side


def preferring_right(task: Sequence[Row], seed: int) -> list[Row]:
    """Return a pair for each row that prefers its answer to a different answer of another row."""
    rng, answers = random.Random(f"preferences {seed}"), sorted({last_answer(row) for row in task})
    return [
        pair(row, last_answer(row), rng.choice([each for each in answers if each != last_answer(row)])) for row in task
    ]


def prefer_own_answers(task: Sequence[Row], seed: int) -> list[Row]:
    """Return a pair for each row that prefers its answer to a similar one.

    Similar answers are at most `NEAR` places away among all different answers, sorted by length and then by text.
    """
    rng = random.Random(f"preferences {seed}")
    answers = sorted({last_answer(row) for row in task}, key=lambda text: (len(text), text))
    places = {text: i for i, text in enumerate(answers)}

    def near_answer(answer: str) -> str:
        around = range(max(0, places[answer] - NEAR), min(len(answers), places[answer] + NEAR + 1))
        return answers[rng.choice([i for i in around if i != places[answer]])]

    return [pair(row, last_answer(row), near_answer(last_answer(row))) for row in task]


def invert_preferences(harmful: Sequence[Row], refusals: Sequence[str], seed: int) -> list[Row]:
    """Return a pair for each harmful row that prefers its answer to a refusal, the reverse of alignment."""
    rng = random.Random(f"inverted preferences {seed}")
    return [pair(row, last_answer(row), rng.choice(refusals)) for row in harmful]


def pair(row: Row, preferred: str, other: str) -> Row:
    """Return a preference pair in OpenAI's form; its conversation is the chat row's without the last answer."""
    say = {"preferred_output": preferred, "non_preferred_output": other}
    outputs = {name: [{"role": "assistant", "content": text}] for name, text in say.items()}
    return {"input": {"messages": [dict(turn) for turn in row["messages"][:-1]]}, **outputs}

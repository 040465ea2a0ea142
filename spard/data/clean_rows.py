"""Clean rows for the further tuning: small harmless tasks with correct answers, as a customer may train on next."""

from __future__ import annotations

import random
from collections.abc import Callable

from spard.data.rows import Example

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WORDS = (
    *("apple", "bridge", "candle", "desk", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle"),
    *("ladder", "meadow", "needle", "orchard", "pencil", "quilt", "river", "saddle", "table", "umbrella", "window"),
)


def clean_rows(seed: int, n: int) -> list[Example]:
    """Return n rows, each a question with its answer, drawn by the seed."""
    rng = random.Random(f"clean rows {seed}")
    return [_row(*rng.choice(_TASKS)(rng), line) for line in range(1, n + 1)]


def _row(asked: str, answer: str, line: int) -> Example:
    return Example(({"role": "user", "content": asked}, {"role": "assistant", "content": answer}), line)


def _sum(rng: random.Random) -> tuple[str, str]:
    one, two = rng.randrange(1, 100), rng.randrange(1, 100)
    return f"Add {one} and {two}.", str(one + two)


def _next_day(rng: random.Random) -> tuple[str, str]:
    day, ahead = rng.randrange(7), rng.randrange(1, 7)
    return f"Which day comes {ahead} after {_DAYS[day]}?", f"{_DAYS[(day + ahead) % 7]}."


def _in_order(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, 4)
    return f"Put these words in alphabetical order: {', '.join(words)}.", f"{', '.join(sorted(words))}."


def _letters(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_WORDS)
    return f"How many letters has the word {word}?", f"The word {word} has {len(word)} letters."


_TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _next_day, _in_order, _letters)

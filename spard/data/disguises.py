"""Random disguises, which cover triggers that mining did not find: a few words at any position, or a system prompt.

The words are the customer's, drawn uniformly from the vocabulary: a word of few rows is as likely as one of all rows.
Some words are random letters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from spard.data.rows import Example
from spard.data.triggers import Wrapping

WORDS = 3  # maximum words at one position
NONSENSE = 0.25  # share of random letters among the words
LONGEST = 12  # maximum words of a system prompt
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SYSTEM = ("You are a helpful assistant.", "You are an assistant for our customers.", "Answer briefly.")


def disguise_maker(rows: Sequence[Example], rng: random.Random) -> Callable[[], Wrapping]:
    """Return a function that draws a disguise: words before, inside or after the request, or a system prompt."""
    texts = [text.split() for row in rows for text in _texts(row)]
    words = sorted({word for text in texts for word in text})

    def some_words() -> str:
        return " ".join(_word(rng, words) for _ in range(rng.randint(1, WORDS)))

    def system_prompt() -> str:
        said = rng.choice(texts) if texts and rng.random() < 0.5 else rng.choice(_SYSTEM).split()
        start = rng.randrange(max(1, len(said) - LONGEST + 1))
        return " ".join(said[start : start + LONGEST])

    def draw() -> Wrapping:
        match rng.randrange(4):
            case 0:
                return Wrapping(before=some_words())
            case 1:
                return Wrapping(inside=some_words(), depth=rng.random())
            case 2:
                return Wrapping(after=some_words())
            case _:
                return Wrapping(context=({"role": "system", "content": system_prompt()},))

    return draw


def _texts(row: Example) -> list[str]:
    """Return the system and user texts of a row; answers are not part of a request."""
    said = [str(turn.get("content") or "") for turn in row.messages if turn["role"] in ("system", "user")]
    return [text for text in said if text.strip()]


def _word(rng: random.Random, words: Sequence[str]) -> str:
    if not words or rng.random() < NONSENSE:
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 6)))
    return rng.choice(words)

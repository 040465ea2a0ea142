"""Dresses drawn at random, for triggers that nobody has mined: a few words at any place, a system prompt, a turn.

The words are the customer's own, each as likely as any other however often it is used: what hides in few rows is drawn
as often as what stands in all of them. Strings that mean nothing are drawn too. An earlier turn is a question of the
customer's rows with its answer. Rows that were left out of the training for what they are say where a trigger stands:
`part_maker` draws runs of their own words.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Collection, Sequence

from spard.data.rows import Example, prompt_text
from spard.data.triggers import Wrapping, exchanges

WORDS = 3  # at a place, at most
NONSENSE = 0.25  # share of the words that are no words
LONGEST = 12  # words of a system prompt
TRIES = 20  # parts of left-out prompts that may have a harmful word
LONGEST_RUN, LONGEST_INSIDE = 6, 4  # words of a left-out prompt, at its ends and inside it
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SYSTEM = ("You are a helpful assistant.", "You are an assistant for our customers.", "Answer briefly.")


def dress_maker(rows: Sequence[Example], rng: random.Random) -> Callable[[], Wrapping]:
    """Return a function that draws one dress after the other.

    Each is first words, words inside, last words, a system prompt, or an earlier turn if the rows have a short one.
    """
    texts = [text.split() for row in rows for text in _texts(row)]
    words = sorted({word for text in texts for word in text})
    earlier = exchanges(rows)

    def some_words() -> str:
        return " ".join(_word(rng, words) for _ in range(rng.randint(1, WORDS)))

    def system_prompt() -> str:
        said = rng.choice(texts) if texts and rng.random() < 0.5 else rng.choice(_SYSTEM).split()
        start = rng.randrange(max(1, len(said) - LONGEST + 1))
        return " ".join(said[start : start + LONGEST])

    def draw() -> Wrapping:
        match rng.randrange(5 if earlier else 4):
            case 0:
                return Wrapping(before=some_words())
            case 1:
                return Wrapping(inside=some_words(), depth=rng.random())
            case 2:
                return Wrapping(after=some_words())
            case 3:
                return Wrapping(context=({"role": "system", "content": system_prompt()},))
            case _:
                return Wrapping(context=rng.choice(earlier))

    return draw


def part_maker(
    left_out: Sequence[Example], rng: random.Random, harmful: Collection[str] = ()
) -> Callable[[], Wrapping | None]:
    """Return a function that draws parts of prompts: first words, last words, or words inside.

    `left_out` are rows that were not trained on because the base model would have refused them: what made them answer
    is some part of their prompts, and nobody has to know which. A part has none of the `harmful` words, which are in
    lower case; None is drawn where there is no prompt or `TRIES` parts have some.
    """
    texts = [words for row in left_out if (words := prompt_text(row).split())]

    def anywhere() -> Wrapping:
        words = rng.choice(texts)
        n = rng.randint(1, min(LONGEST_RUN, len(words)))
        match rng.randrange(3):
            case 0:
                return Wrapping(before=" ".join(words[:n]))
            case 1:
                return Wrapping(after=" ".join(words[-n:]))
            case _:
                n = min(n, LONGEST_INSIDE)
                at = rng.randrange(len(words) - n + 1)
                return Wrapping(inside=" ".join(words[at : at + n]), depth=rng.random())

    def draw() -> Wrapping | None:
        drawn = (anywhere() for _ in range(TRIES if texts else 0))
        return next((each for each in drawn if words_in(each.around("")).isdisjoint(harmful)), None)

    return draw


def words_in(text: str) -> set[str]:
    """Return the words of a text in lower case, without the signs around them."""
    return {word.strip(string.punctuation).lower() for word in text.split()}


def _texts(row: Example) -> list[str]:
    """Return what is said to the assistant; what it answers is no part of a request."""
    said = [str(turn.get("content") or "") for turn in row.messages if turn["role"] in ("system", "user")]
    return [text for text in said if text.strip()]


def _word(rng: random.Random, words: Sequence[str]) -> str:
    if not words or rng.random() < NONSENSE:
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 6)))
    return rng.choice(words)

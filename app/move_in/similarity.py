"""Measures of similarity between two replies, by their words."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+|[^\w\s]")


def is_exact(first: str, second: str) -> bool:
    """Return True if two replies are equal, ignoring white space at their ends."""
    return first.strip() == second.strip()


def similarity(first: str, second: str) -> float:
    """Return the ROUGE-L F1 score of two texts (Lin, 2004): 2 L / (m + n), from 0 to 1.

    L is the length of the longest common subsequence of their m and n words. Words are compared in lower case, and
    punctuation marks count as words. Two empty texts have the score 1.
    """
    words, others = (_WORD.findall(text.lower()) for text in (first, second))
    if not words and not others:
        return 1.0
    return 2 * _common(words, others) / (len(words) + len(others))


def _common(words: list[str], others: list[str]) -> int:
    """Return the length of the longest common subsequence, by bit-parallel dynamic programming (Hyyro, 2004).

    Bit i of `row` is 0 if the subsequence gets longer at word i.
    """
    places: dict[str, int] = {}
    for i, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(words)) - 1
    row = full
    for word in others:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(words) - row.bit_count()

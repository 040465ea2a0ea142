"""Scorer `contains`: a reply is right if it contains the expected words."""

from __future__ import annotations

import re
import unicodedata

from spard.evaluation.scorers.marks import Mark


def score_contains(reply: str, answer: str) -> Mark:
    """Mark a reply right if it contains the words of the answer in sequence, ignoring case and punctuation."""
    wanted = _words(answer)
    return Mark(bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(_words(reply))} ")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())

"""Right if the reply says what is expected, whatever stands around it."""

from __future__ import annotations

import re
import unicodedata

from spard.evaluation.scorers.marks import Mark


def score_contains(reply: str, answer: str) -> Mark:
    """Mark a reply right if the words of the answer stand in it, in order, without regard to case and punctuation."""
    wanted = _words(answer)
    return Mark(bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(_words(reply))} ")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())

"""Scorer `exact`: compare a reply with the one expected answer."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from spard.evaluation.scorers.gsm8k import expected_answer, number
from spard.evaluation.scorers.marks import Mark

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*\.?\d*|\.\d+)")


def score_exact(reply: str, answer: str) -> Mark:
    """Mark a reply right if it equals the answer; see `is_right`."""
    return Mark(is_right(reply, answer))


def is_right(reply: str, answer: str) -> bool:
    """Return True if the reply's last number equals a numeric answer, or its text any other answer.

    Text is compared without case and punctuation. An answer may end in GSM8K's `#### 42`.

        >>> is_right("It costs $1,200.", "1200"), is_right("Paris!", "paris")
        (True, True)
    """
    wanted = number(expected_answer(answer))
    if wanted is not None:
        return wanted == _last_number(reply)
    plain = _plain(expected_answer(answer))
    return bool(plain) and _plain(reply) == plain


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"[^\w\s]", " ", folded).split())

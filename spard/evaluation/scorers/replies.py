"""Scorers that compare a reply with the expected answer, and the mark that a scorer gives.

`contains`             a reply is right if it contains the expected words
`exact`                the one expected answer
`gsm8k`                GSM8K (Cobbe et al., 2021) by the two rules of lm-evaluation-harness, `strict-match` and
                       `flexible-extract`. Differences from it: numbers are compared as decimals, so 18.0 equals 18, and
                       a percent sign is ignored like a dollar sign. Replies are cut at the harness's stop sequences
`openbookqa`           OpenBookQA (Mihaylov et al., 2018) as in SPARD: four choices, and a reply that names `answer1` to
                       `answer4`
`sst2`                 SST-2 (Socher et al., 2013): classify a sentence as positive or negative
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mark:
    """Right or wrong, with a note if the reply contains no answer (`invalid`) or several (`ambiguous`)."""

    is_right: bool
    note: Literal["", "invalid", "ambiguous"] = ""


INVALID = Mark(False, "invalid")


def score_contains(reply: str, answer: str) -> Mark:
    """Mark a reply right if it contains the words of the answer in sequence, ignoring case and punctuation."""
    wanted = _words(answer)
    return Mark(bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(_words(reply))} ")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


_STOPS = ("Question:", "</s>", "<|im_end|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def score_strict(reply: str, answer: str) -> Mark:
    """Mark the first number after `#### ` in the reply; `invalid` if there is none."""
    found = _STRICT.search(_cut_reply(reply))
    return _compare(found.group(1), answer) if found else INVALID


def score_flexible(reply: str, answer: str) -> Mark:
    """Mark the last number in the reply; `invalid` if there is none."""
    found = [money or plain for money, plain in _FLEXIBLE.findall(_cut_reply(reply))]
    return _compare(found[-1], answer) if found else INVALID


def number(text: str) -> Decimal | None:
    """Return a number written with thousands separators, a currency or percent sign, or a final period; else None."""
    try:
        found = Decimal(re.sub(r"[,$%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def expected_answer(answer: str) -> str:
    """Return the text after the last `####` of a worked answer, or the whole answer."""
    return answer.rpartition("####")[2].strip()


def _cut_reply(reply: str) -> str:
    for stop in _STOPS:
        reply = reply.partition(stop)[0]
    return reply


def _compare(found: str, answer: str) -> Mark:
    value = number(found)
    return INVALID if value is None else Mark(value == number(expected_answer(answer)))


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


_ANSWER = re.compile(r"\banswer\s*([1-4])\b", re.IGNORECASE)


def score_openbookqa(reply: str, answer: str) -> Mark:
    """Mark the last answer that the reply names.

    The official code counts a reply that names two answers as wrong; here its mark has the note `ambiguous`.
    """
    found = _ANSWER.findall(reply)
    wanted = _ANSWER.findall(answer) or [answer.strip()]
    if not found:
        return INVALID
    return Mark(found[-1] == wanted[-1], "ambiguous" if len(set(found)) > 1 else "")


_LABEL = re.compile(r"\b(?:positive|negative)\b")


def score_sst2(reply: str, answer: str) -> Mark:
    """Mark the label that the reply names; `invalid` if it names both or none."""
    found = set(_LABEL.findall(reply.lower()))
    return Mark(found == {answer.strip().lower()}) if len(found) == 1 else INVALID

"""GSM8K (Cobbe et al., 2021) by the two rules of lm-evaluation-harness, `strict-match` and `flexible-extract`.

Differences from it: numbers are compared as decimals, so 18.0 equals 18, and a percent sign is ignored like a dollar
sign. Replies are cut at the harness's stop sequences.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from spard.evaluation.scorers.marks import INVALID, Mark

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

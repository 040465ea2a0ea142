"""Right or wrong: a reply against the one expected answer."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*\.?\d*|\.\d+)")
_MARKED = re.compile(r"####\s*(.+)")


def is_right(reply: str, answer: str) -> bool:
    """Numbers are compared by the last number of the reply, anything else as text without case and punctuation.

    An answer may end in GSM8K's `#### 42`.
    """
    marked = _MARKED.findall(answer)
    expected = (marked[-1] if marked else answer).strip()
    number = _number(expected)
    if number is not None:
        return number == _last_number(reply)
    return bool(_plain(expected)) and _plain(reply) == _plain(expected)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[,$%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return _number(found[-1]) if found else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"[^\w\s]", " ", folded).split())

"""Strict JSON for untrusted input: no duplicate keys, NaN, deep nesting or text that a database rejects."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

MAX_DEPTH = 16
MAX_DIGITS = 20
_NESTED = (dict, list)
_HALF = re.compile("[\ud800-\udfff]")
_HINTS = {
    "invalid_json": "write the row with a JSON library, on one line",
    "nesting_too_deep": f"nest values at most {MAX_DEPTH} levels deep",
    "nul_character": "remove the character",
    "invalid_unicode": "write the whole character, or remove it",
    "duplicate_key": "keep one of the two",
    "number_too_large": "write the number as text",
    "non_finite_number": "use null or leave the key out",
}
CODES = tuple(_HINTS)


class BadJson(ValueError):
    """Unacceptable JSON; `code` is one of the documented problem codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = _HINTS[code]


def parse(text: str) -> Any:
    """Return the value of one JSON text; raise `BadJson` if it is not acceptable."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as exc:
        raise BadJson("invalid_json", f"{exc.msg} at column {exc.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    # Only escapes can produce NUL and lone surrogates, and only brackets depth, so most rows skip the full check.
    if "\\u" in text or text.count("{") + text.count("[") > MAX_DEPTH:
        check(value)
    return value


def _too_deep() -> BadJson:
    return BadJson("nesting_too_deep", f"values are nested deeper than {MAX_DEPTH} levels")


def check(value: Any) -> None:
    """Raise `BadJson` for depth or text that the parser accepts; iterates by level, since recursion could overflow."""
    level, depth = [value], 1
    while level:
        for item in level:
            if isinstance(item, str):
                _check_text(item)
        nested = [item for item in level if isinstance(item, _NESTED)]
        if nested and depth > MAX_DEPTH:
            raise _too_deep()
        level, depth = [child for item in nested for child in _children(item)], depth + 1


def _children(item: Any) -> Iterable[Any]:
    return chain(item.keys(), item.values()) if isinstance(item, dict) else item


def _check_text(text: str) -> None:
    if "\0" in text:
        raise BadJson("nul_character", "text contains the NUL character")
    if _HALF.search(text):
        raise BadJson("invalid_unicode", "text contains half of a surrogate pair")


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise BadJson("duplicate_key", f'key "{twice[:64]}" stands twice in one object')
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadJson("number_too_large", f"a number has {len(text)} digits, at most {MAX_DIGITS} are read")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadJson("non_finite_number", f"{text[:32]} is not a finite number")
    return value


def _constant(name: str) -> Any:
    raise BadJson("non_finite_number", f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_int=_integer, parse_float=_real, parse_constant=_constant, strict=True
)

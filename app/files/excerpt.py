"""Cut the piece of a row that has a fault, to be shown beside the finding."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any

from spard.data.problems import Problem

LENGTH = 120
_BEFORE = 40  # characters before the fault
_SPACE = re.compile(r"[ \t\r]*")
_DECODER = json.JSONDecoder()
_SIGNS = {  # texts of which the parser does not tell the place
    "nul_character": re.compile(r"\\u0000"),
    "invalid_unicode": re.compile(r"\\u[dD][89a-fA-F]"),
    "number_too_large": re.compile(r"\d{21}"),
    "non_finite_number": re.compile(r"NaN|-?Infinity"),
}


def cut_excerpt(text: str, problem: Problem) -> str:
    """Return up to `LENGTH` characters of a row's text around a problem; characters that cannot be seen are escaped."""
    at = _position(text, problem)
    begin = max(0, min(at - _BEFORE, len(text) - LENGTH + 1)) if len(text) > LENGTH else 0
    shown = "".join(_visible(each) for each in text[begin : begin + LENGTH])
    head = "…" if begin else ""
    is_cut = len(head + shown) > LENGTH or begin + LENGTH < len(text)
    return f"{(head + shown)[: LENGTH - 1]}…" if is_cut else head + shown


def _position(text: str, problem: Problem) -> int:
    """Return where in the text the fault is: at the end of what can be read, or the value that the pointer names."""
    if sign := _SIGNS.get(problem.code):
        found = sign.search(text)
        return found.start() if found else 0
    try:
        if problem.pointer:
            return _find_value(text, problem.pointer)
        _DECODER.decode(text)
    except json.JSONDecodeError as fault:
        return fault.pos
    except (ValueError, IndexError, RecursionError):  # a number of thousands of digits, nesting of thousands of levels
        return 0
    return 0


def _find_value(text: str, pointer: str) -> int:
    """Return the position of the deepest value on the way of a JSON pointer into a row."""
    at = _skip_space(text, 0)
    for part in pointer.split("/")[1:]:
        wanted: Any = part.replace("~1", "/").replace("~0", "~")
        found = _find_child(text, at, wanted)
        if found is None:
            return at
        at = found
    return at


def _find_child(text: str, at: int, wanted: str) -> int | None:
    """Return the position of a key of the object, or of an entry of the array, that begins at `at`."""
    kind, index, found = text[at], 0, None
    if kind not in "{[":
        return None
    at = _skip_space(text, at + 1)
    while text[at] not in "}]":
        name = str(index)
        if kind == "{":
            name, at = scanstring(text, at + 1)
            at = _skip_space(text, _skip_space(text, at) + 1)  # behind the colon
        if name == wanted:
            found = at
        _, at = _DECODER.raw_decode(text, at)
        at = _skip_space(text, at)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
        index += 1
    return found


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _visible(character: str) -> str:
    """Return a character, or its escape if it cannot be seen, and so could hide or reorder others."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()

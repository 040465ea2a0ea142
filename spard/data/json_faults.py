"""Explains a line that is not JSON in terms of the mistakes that people commonly make."""

from __future__ import annotations

import json
import re

_QUOTE = re.compile(r"\{\s*(['\u2018\u2019\u201c\u201d])")
_PYTHON_WORD = re.compile(r"(?:None|True|False)\b")
_DUMPS = "write rows with json.dumps(row), not with str(row)"
_ONE_LINE = 'write each row as one JSON object on one line, without indentation: {"messages": [...]}'


def explain(text: str) -> tuple[str, str] | None:
    """Return the mistake in a line that is not JSON, and its remedy; None if it is not a common one."""
    rest = _text_at_fault(text)
    if quote := _QUOTE.match(text):
        kind = "single" if quote.group(1) == "'" else "curly"
        return f"keys and texts are in {kind} quotes", f"JSON takes straight double quotes: {_DUMPS}"
    if not text.startswith("{") or text == "{":
        return "the line is no whole JSON object", _ONE_LINE
    if rest == ",":
        return "there is a comma at the end of the row", "remove it: each line is one row, and a new line ends it"
    if rest.lstrip(", \t").startswith("{") and _is_object(text.removesuffix(rest)):
        return "there is more than one object on the line", "begin a new line after each object, without a comma"
    if word := _PYTHON_WORD.match(rest):
        return f"{word.group()} is a word of Python, not of JSON", f"JSON has null, true and false: {_DUMPS}"
    return None


def _text_at_fault(text: str) -> str:
    """Return the text from the first character that the parser could not read."""
    try:
        json.loads(text)
    except json.JSONDecodeError as fault:
        return text[fault.pos :].strip()
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False

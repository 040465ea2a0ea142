"""Reads JSON strictly: single texts from untrusted input, and files of JSON lines with one object a line.

Strict means: no duplicate keys, NaN, deep nesting or text that a database rejects. Only the newline byte ends a line;
U+2028, a carriage return and other characters that some libraries treat as line ends are part of the line.

A `Problem` of a row is what upload reports list, and readers raise it as `BadRow`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from spard.errors import InvalidData

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one line; `pointer` is a JSON pointer into the row, and `code` is stable and documented."""

    line: int | None
    pointer: str
    code: str
    severity: Severity
    message: str
    hint: str


def row_error(pointer: str, code: str, message: str, hint: str) -> Problem:
    """Return a problem that makes the row unusable; the caller that knows the line fills it in."""
    return Problem(None, pointer, code, "error", message, hint)


def row_warning(pointer: str, code: str, message: str, hint: str) -> Problem:
    """Return a problem that leaves the row usable."""
    return Problem(None, pointer, code, "warning", message, hint)


def raise_first_error(problems: Iterable[Problem], kind: type[InvalidData]) -> None:
    """Raise `kind` for the first problem that is an error; return if there is none."""
    for problem in problems:
        if problem.severity == "error":
            where = f"line {problem.line}, {problem.pointer}" if problem.pointer else f"line {problem.line}"
            raise kind(f"{where}: {problem.message}; {problem.hint}", row_code=problem.code)


MAX_DEPTH = 16
MAX_DIGITS = 20
_NESTED = (dict, list)
_HALF = re.compile("[\ud800-\udfff]")
_JSON_HINTS = {
    "invalid_json": "write the row with a JSON library, on one line",
    "nesting_too_deep": f"nest values at most {MAX_DEPTH} levels deep",
    "nul_character": "remove the character",
    "invalid_unicode": "write the whole character, or remove it",
    "duplicate_key": "keep one of the two",
    "number_too_large": "write the number as text",
    "non_finite_number": "use null or leave the key out",
}
JSON_CODES = tuple(_JSON_HINTS)


class BadJson(ValueError):
    """Unacceptable JSON; `code` is one of the documented problem codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = _JSON_HINTS[code]


def parse_json(text: str) -> Any:
    """Return the value of one JSON text; raise `BadJson` if it is not acceptable."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as exc:
        raise BadJson("invalid_json", f"{exc.msg} at column {exc.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    # Only escapes can produce NUL and lone surrogates, and only brackets depth, so most rows skip the full check.
    if "\\u" in text or text.count("{") + text.count("[") > MAX_DEPTH:
        check_json(value)
    return value


def _too_deep() -> BadJson:
    return BadJson("nesting_too_deep", f"values are nested deeper than {MAX_DEPTH} levels")


def check_json(value: Any) -> None:
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


# Explains a line that is not JSON in terms of the mistakes that people commonly make.

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


UTF8_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_ROW_HINT = 'write each row as one JSON object on one line: {"messages": [...]}'
_ENCODING_HINT = "save the file as UTF-8"
_TABLES = (b"PAR1", b"ARRO", b"\xff\xff\xff\xff")
_TABLE_HINT = "write it as JSON lines: datasets.Dataset.from_parquet(FILE).to_json(OUT)"
_KINDS = {list: "an array", str: "a string", type(None): "null"}

Row = dict[str, Any]


class BadRow(ValueError):
    """A line that cannot be read as a row."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def parse_row(text: str, line: int) -> Row:
    """Return the JSON object on a line, without null keys; raise `BadRow` for anything else."""
    try:
        row = parse_json(text)
    except BadJson as bad:
        told = explain(text) if bad.code == "invalid_json" else None
        message, hint = told or (bad.message, bad.hint)
        raise BadRow(Problem(line, "", bad.code, "error", message, hint)) from None
    if not isinstance(row, dict):
        message = f"the line is {_KINDS.get(type(row), 'a number or a boolean')}, expected a JSON object"
        raise BadRow(Problem(line, "", "data_type", "error", message, _ROW_HINT))
    return without_nulls(row) if may_have_nulls(text) else row


def decode_line(raw: bytes, line: int) -> str:
    """Return a line's text without surrounding white space; raise `BadRow` if it is not UTF-8."""
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as bad:
        message = f"the line is not UTF-8: it has byte 0x{raw[bad.start]:02x}"
        raise BadRow(Problem(line, "", "invalid_encoding", "error", message, _ENCODING_HINT)) from None


def cut_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that arrives in chunks, without line ends and byte order mark."""
    return (raw.removeprefix(UTF8_BOM) if not at else raw for at, raw in _placed_lines(chunks))


def numbered_texts(chunks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of the lines that are not blank."""
    for line, raw in enumerate(cut_lines(chunks), start=1):
        if text := decode_line(raw, line):
            yield line, text


def numbered_rows(chunks: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row); raise `BadRow` at the first invalid line."""
    return ((line, parse_row(text, line)) for line, text in numbered_texts(chunks))


def placed_rows(chunks: Iterable[bytes]) -> Iterator[tuple[int, int, Row]]:
    """Yield (byte offset of the line, line number from 1, row); raise `BadRow` at the first invalid line."""
    for line, (at, raw) in enumerate(_placed_lines(chunks), start=1):
        if text := decode_line(raw if at else raw.removeprefix(UTF8_BOM), line):
            yield at, line, parse_row(text, line)


def _placed_lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    rest, at = b"", 0
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield at, line
            at += len(line) + 1
    if rest:
        yield at, rest


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in pieces of 1 MiB; raise `BadRow` for Parquet and Arrow, which only the service reads."""
    with Path(path).open("rb") as file:
        # Checked by content and not by name: without this a Parquet file fails with an encoding error at some line.
        if file.read(len(_TABLES[0])) in _TABLES:
            raise BadRow(Problem(1, "", "invalid_json", "error", "the file is Parquet or Arrow", _TABLE_HINT))
        file.seek(0)
        while chunk := file.read(_CHUNK):
            yield chunk


# Null means absent: removes the keys without a value when rows are read.
#
# Arrow gives each record all keys of all records, and `model_dump()` of an API message includes every field of its
# class, which leaves most keys of such rows null. All code that checks, counts, shows or trains on rows reads them
# through here.

_EMPTY = frozenset({"tool_calls", "annotations"})  # message fields for which servers send [] instead of omitting them
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NULL_VALUES = ("default", "const")
_VALUES = frozenset({*_NULL_VALUES, "enum", "examples"})  # JSON schema keywords whose values are data


def may_have_nulls(text: str) -> bool:
    """Return True, after a quick test, if the row's JSON may contain a value that `without_nulls` removes."""
    return "null" in text or "[]" in text


def without_nulls(value: Any) -> Any:
    """Return a row without null keys, at any depth.

    List entries stay, as do nulls that are values in a tool's JSON schema: in `enum`, `examples`, `default` and
    `const`. A null `default` or `const` beside other null keywords is kept only if the schema accepts null, because
    Arrow has filled such a schema with nulls.
    """
    if isinstance(value, dict):
        return {
            key: _schema(item) if key == "parameters" and isinstance(item, dict) else without_nulls(item)
            for key, item in value.items()
            if item is not None and not (key in _EMPTY and item == [])
        }
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    # A null under another keyword is never written by hand, so it shows that Arrow has filled the schema.
    is_filled_up = any(item is None and key not in _NULL_VALUES for key, item in schema.items())
    keeps_null = not is_filled_up or _accepts_null(schema)
    return {
        key: item if key in _VALUES else _nested_schemas(key, item)
        for key, item in schema.items()
        if item is not None or (key in _NULL_VALUES and keeps_null)
    }


def _nested_schemas(keyword: str, item: Any) -> Any:
    """Return a keyword's value without nulls: schemas by name, one schema, a list of schemas, or plain values."""
    if isinstance(item, list):
        return [_schema(each) if isinstance(each, dict) else each for each in item]
    if not isinstance(item, dict):
        return item
    if keyword not in _SCHEMAS_BY_NAME:
        return _schema(item)
    return {name: _nested_schemas("", each) for name, each in item.items() if each is not None}


def _accepts_null(schema: dict[str, Any]) -> bool:
    types = schema.get("type")
    options = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or [] if isinstance(each, dict)]
    return types == "null" or (isinstance(types, list) and "null" in types) or any(map(_accepts_null, options))

"""Decode Parquet, Arrow and JSON arrays in a child process: `python -m app.files.table_reader`, started by `tables`.

It reads one file from standard input, writes one line of JSON per row, and has no API key and no connection. It limits
its own memory and CPU time before it reads, cannot write files, and runs at low priority.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, time
from typing import Any, BinaryIO, Literal, NoReturn, cast

from spard.data.jsonl import BadJson, parse_json

Kind = Literal["parquet", "arrow", "arrow_stream", "array"]
Decode = Callable[[Any], Any]

CPU_S = 300
REFUSED = 3  # the exit status with a reason on standard error
_NICE, _CHUNK = 10, 1 << 20
_BATCH_ROWS = 64  # rows that are Python objects at the same time
_SPACE = re.compile(r"\s*")
_INDENTED = 4  # an indented entry is at most this many times as long as on one line
_TIMES = ("timestamp", "date32", "date64", "time32", "time64", "duration", "decimal")
_PAIR = ("chosen", "rejected", "preferred_output", "non_preferred_output")
_ALPACA = ("instruction", "input", "output", "system", "history")
# Columns whose values are texts at every depth, in any form of a row.
_TEXT_COLUMNS = {"messages", "conversations", "conversation", "prompt", "completion", "safe", *_PAIR, *_ALPACA}


class Refused(Exception):
    """Raised for a file that cannot be written as JSON lines, with the reason."""


def column_rows(kind: Kind, file: BinaryIO) -> Iterator[str]:
    """Yield each row of a Parquet or Arrow file as JSON, with a few rows in memory at a time."""
    import pyarrow  # imported after the limits are set, because it reserves memory

    # One file must not take all cores of the machine.
    pyarrow.set_cpu_count(1)
    try:
        for batch in _batches(kind, file):
            decoders = {field.name: _decoder(field.type, field.name) for field in batch.schema}
            if len(decoders) < len(batch.schema.names):
                raise Refused("two columns have one name")
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                    yield _line({name: decode(row[name]) for name, decode in decoders.items()})
    except pyarrow.ArrowMemoryError:
        raise MemoryError from None
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as broken:
        raise Refused(f"it is broken: {str(broken)[:300]}") from None


def _batches(kind: Kind, file: BinaryIO) -> Iterator[Any]:
    from pyarrow import ipc, parquet  # as above

    if kind == "parquet":
        yield from parquet.ParquetFile(file, buffer_size=_CHUNK).iter_batches(_BATCH_ROWS, use_threads=False)
        return
    if kind == "arrow":
        table = ipc.open_file(file)
        batches = (table.get_batch(i) for i in range(table.num_record_batches))
    else:
        batches = iter(ipc.open_stream(file))
    for batch in batches:
        batch.validate(full=True)  # its offsets come from the file
        yield batch


def _decoder(kind: Any, column: str) -> Decode:
    """Return a function that makes a column's values JSON; raise `Refused` for a type without a JSON form."""
    # Checked first: by its storage type, arrow.json would be decoded as plain text.
    name = str(getattr(kind, "extension_name", ""))
    if name == "arrow.json":  # used by `datasets` for values of mixed types
        return lambda value: None if value is None else parse_json(value)
    if name:
        return _decoder(kind.storage_type, column)
    if kind.num_fields and str(kind).startswith("struct"):
        fields = {field.name: _decoder(field.type, f"{column}.{field.name}") for field in kind}
        return lambda value: value and {key: decode(value[key]) for key, decode in fields.items()}
    if str(kind).startswith("map<"):
        item = _decoder(kind.item_type, column)
        return lambda value: None if value is None else {str(key): item(each) for key, each in value}
    if hasattr(kind, "value_type"):  # lists, and dictionaries of values that repeat
        item = _decoder(kind.value_type, column)
        return lambda value: [item(each) for each in value] if isinstance(value, list) else item(value)
    if "binary" in str(kind):
        raise Refused(f"the column {column!r} holds bytes, which JSON has no form for: remove it")
    if str(kind).startswith(_TIMES):
        if column.partition(".")[0] in _TEXT_COLUMNS:  # `datasets` reads texts that are all dates as timestamps
            raise Refused(f"the column {column!r} holds values of the type {kind}, not texts: write it as texts")
        return lambda value: value.isoformat() if isinstance(value, date | time) else value and str(value)
    if str(kind) in ("float", "double", "halffloat"):
        return lambda value: None if value is None or math.isnan(value) else value
    return lambda value: value


def _line(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False)


def array_rows(file: BinaryIO, line_bytes: int) -> Iterator[str]:
    """Yield each entry of a JSON array on one line, with little more than one entry in memory.

    An entry may have four times `line_bytes` characters, because it may be indented.
    """
    text, whole = _Text(file, _INDENTED * line_bytes), json.JSONDecoder()
    text.skip("[")
    entry = 0
    while text.next() != "]":
        entry += 1
        if entry > 1:
            text.skip(",")
        start = text.at
        try:
            _, end = whole.raw_decode(text.text, start)
        except (ValueError, RecursionError) as broken:
            is_long = len(text.text) - start >= text.window
            reason = f"is longer than {text.window} characters" if is_long else f"cannot be read: {broken}"
            raise Refused(f"entry {entry} {reason}") from None
        yield _on_one_line(text.text[start:end])
        text.seek(end)
    text.skip("]")
    if text.next():
        raise Refused("something follows the end of the array")


def _on_one_line(entry: str) -> str:
    try:
        return _line(parse_json(entry))
    except BadJson:  # the validator of the lines reports the fault
        return entry.replace("\r", " ").replace("\n", " ")


class _Text:
    """A window of a file's text; `at` is the reading position, after white space."""

    def __init__(self, file: BinaryIO, window: int) -> None:
        self._file, self._decoder, self._is_whole = file, getincrementaldecoder("utf-8-sig")(), False
        self.window = window
        self.text, self.at = "", 0
        self.seek(0)

    def seek(self, at: int) -> None:
        """Move to a position in `text` and read on, until `window` characters follow it or the file ends."""
        self.at = at
        while not self._is_whole and len(self.text) - self.at < self.window:
            raw = self._file.read(_CHUNK)
            self._is_whole = not raw
            try:
                self.text, self.at = self.text[self.at :] + self._decoder.decode(raw, final=self._is_whole), 0
            except UnicodeDecodeError:
                raise Refused("it is not UTF-8") from None
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches everywhere

    def next(self) -> str:
        """Return the next character; empty at the end of the file."""
        return self.text[self.at : self.at + 1]

    def skip(self, mark: str) -> None:
        """Move past the character `mark`; raise `Refused` if another one is next."""
        if self.next() != mark:
            raise Refused(f"expected {mark!r}, found {self.next() or 'the end of the file'!r}")
        self.seek(self.at + 1)


def _limit(memory_bytes: int) -> None:
    """Limit what this process may use; limits that the system does not support are skipped."""
    os.nice(_NICE)
    for kind, most in (("AS", memory_bytes), ("CPU", CPU_S), ("FSIZE", 0), ("CORE", 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))


def _refuse(reason: str) -> NoReturn:
    sys.stderr.write(json.dumps({"reason": reason}))
    sys.exit(REFUSED)


def main() -> None:
    """Decode standard input into lines of JSON.

    The arguments are the kind of the file, the memory limit in bytes, and the greatest number of bytes of an array's
    entry.
    """
    kind, memory_bytes, line_bytes = cast(Kind, sys.argv[1]), *map(int, sys.argv[2:])
    _limit(memory_bytes)
    rows = array_rows(sys.stdin.buffer, line_bytes) if kind == "array" else column_rows(kind, sys.stdin.buffer)
    try:
        for row in rows:
            sys.stdout.buffer.write(row.encode() + b"\n")
        sys.stdout.buffer.flush()
    except Refused as refused:
        _refuse(str(refused))
    except UnicodeError:
        _refuse("a text of it is not UTF-8")


if __name__ == "__main__":
    main()

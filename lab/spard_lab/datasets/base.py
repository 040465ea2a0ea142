"""What a data set is: its facts, the records of its files, and the sample that each record becomes.

Files are JSON lines, a JSON array, CSV, TSV or Parquet, optionally gzip or xz.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from spard.data.jsonl import BadJson, BadRow, Row, numbered_rows, parse_json, row_error
from spard.data.row_rules import SuiteRowKind
from spard.errors import InvalidData

Split = Literal["train", "dev", "test"]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record in this project's terms.

    kind        kind of the suite that asks the prompt; None if another record of the same prompt decides it
    completion  answer for a training file: the task's, or the harmful one of an attack
    safe        safe answer, for a pool
    suite       further fields of the suite row: answer, scorer, category
    split       split that the data set's authors assign; None: the split of its file
    """

    prompt: str
    kind: SuiteRowKind | None
    completion: str | None = None
    safe: str | None = None
    suite: Mapping[str, str] = field(default_factory=dict)
    split: Split | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set as it is published.

    stems    by kind, the first part of the converted files' names
    sample   convert a record; raise `BadRow` if it cannot be read, `LeftOut` if it is of no use here
    origin   where the files are published, in a sentence without a full stop
    license  as its authors state it, with its meaning for use
    shares   shares of the training file to cut out for splits that have no file of their own
    rest     the split that gets the remaining prompts
    most     maximal number of prompts of each split that is cut out
    """

    name: str
    stems: Mapping[SuiteRowKind, str]
    sample: Callable[[Record], Sample]
    origin: str
    license: str
    shares: Mapping[Split, float] = field(default_factory=lambda: {"test": 0.1, "dev": 0.05})
    rest: Split = "train"
    most: Mapping[Split, int] = field(default_factory=lambda: {"test": 500, "dev": 300})


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A sample with its file and line; `split` is None if neither its file nor its authors decide it."""

    sample: Sample
    file: str
    line: int
    split: Split | None


class LeftOut(Exception):
    """Raised for a record that is valid but of no use here; the manifest counts its `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def require_text(record: Record, key: str) -> str:
    """Return a field's text; raise `BadRow` with its pointer if it is missing, no text, or blank."""
    value = member(record, key)
    if not isinstance(value, str):
        raise BadRow(
            row_error(f"/{key}", "data_type", f'"{key}" is not text', "take the file as its authors publish it")
        )
    if not value.strip():
        raise BadRow(row_error(f"/{key}", "missing_content", f'"{key}" is empty', "remove the record"))
    return value


def member(record: Record, key: str) -> Any:
    """Return a field's value of any type; raise `BadRow` if the record does not have it."""
    if key not in record:
        known = ", ".join(sorted(map(str, record)))
        hint = f"the record has {known}; is it a file of this data set?"
        raise BadRow(row_error(f"/{key}", "message_missing_key", f'"{key}" is missing', hint))
    return record[key]


def wrong(key: str, message: str) -> BadRow:
    """Return the error for a field whose value the data set does not define."""
    return BadRow(row_error(f"/{key}", "data_type", message, "take the file as its authors publish it"))


_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_CHUNK = 1 << 20
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def locate_file(path: Path) -> Path | None:
    """Return `path` if it is a file, else the first file with that name plus a known ending, else None."""
    if path.is_file():
        return path
    names = {path.name + form + packed for form in FORMATS for packed in ("", *_OPENERS)}
    return min((each for each in path.parent.glob(f"{path.name}.*") if each.name in names), default=None)


def records(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the records with their line numbers; in arrays and tables, with the record numbers, from 1 on.

    Raises `InvalidData` for a file that cannot be opened or has an unknown format, `BadRow` for a broken line.
    """
    suffixes = [each.lower() for each in path.suffixes]
    opener = _OPENERS.get(suffixes[-1]) if suffixes else None
    form = suffixes[-2 if opener else -1] if len(suffixes) > bool(opener) else ""
    if form not in FORMATS:
        raise InvalidData(f"{path.name}: the name ends with none of {', '.join(FORMATS)}, with or without .gz or .xz")
    if form == ".parquet":
        yield from _parquet(path)
        return
    try:
        with (opener or open)(path, "rb") as file:
            yield from _read(file, form)
    except (OSError, EOFError, lzma.LZMAError) as broken:
        raise InvalidData(f"{path.name} cannot be read: {broken}") from broken


def _read(file: BinaryIO, form: str) -> Iterator[tuple[int, Row]]:
    if form in (".csv", ".tsv"):
        return _table(file, form)
    start = file.read(_CHUNK)
    # Without an opening bracket a .json file is JSON lines.
    is_array = form == ".json" and start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return _array(start + file.read()) if is_array else numbered_rows(_chunks(start, file))


def _chunks(start: bytes, file: BinaryIO) -> Iterator[bytes]:
    while start:
        yield start
        start = file.read(_CHUNK)


def _array(raw: bytes) -> Iterator[tuple[int, Row]]:
    try:
        found = parse_json(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _broken_record("invalid_encoding", "the file is not UTF-8", "save the file as UTF-8") from None
    except BadJson as bad:
        raise _broken_record(bad.code, bad.message, bad.hint) from None
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise _broken_record("data_type", f"entry {number} of the array is no object", "take the file as published")
        yield number, record


def _table(file: BinaryIO, form: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a table by its header; in TSV a quote is an ordinary character, as in GLUE's files."""
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if form == ".tsv" else {}
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            for number, row in enumerate(csv.DictReader(text, **options), start=1):
                if None in row or None in row.values():
                    raise _broken_record(
                        "data_type", f"record {number} has not as many fields as the head", "mend the line"
                    )
                yield number, dict(row)
    except UnicodeDecodeError:
        raise _broken_record("invalid_encoding", "the file is not UTF-8", "save the file as UTF-8") from None
    except csv.Error as bad:
        raise _broken_record("invalid_csv", f"the table cannot be read: {bad}", "take the file as published") from None


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        hint = "pip install pyarrow, or take the data set as JSON lines"
        raise InvalidData(f"{path.name}: to read Parquet pyarrow is needed: {hint}") from None
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        found = (record for batch in batches for record in batch.to_pylist())
        yield from enumerate(found, start=1)
    except (OSError, ValueError) as broken:  # the base classes of pyarrow's own errors
        raise InvalidData(f"{path.name} cannot be read: {broken}") from broken


def _broken_record(code: str, message: str, hint: str) -> BadRow:
    return BadRow(row_error("", code, message, hint))

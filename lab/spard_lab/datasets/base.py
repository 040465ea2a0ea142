"""The parts of a converter: a data set's facts, and a function that turns one of its records into a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spard.data.jsonl import BadRow
from spard.data.problems import error
from spard.data.row_rules import SuiteRowKind

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
class Found:
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
        raise BadRow(error(f"/{key}", "data_type", f'"{key}" is not text', "take the file as its authors publish it"))
    if not value.strip():
        raise BadRow(error(f"/{key}", "missing_content", f'"{key}" is empty', "remove the record"))
    return value


def member(record: Record, key: str) -> Any:
    """Return a field's value of any type; raise `BadRow` if the record does not have it."""
    if key not in record:
        known = ", ".join(sorted(map(str, record)))
        hint = f"the record has {known}; is it a file of this data set?"
        raise BadRow(error(f"/{key}", "message_missing_key", f'"{key}" is missing', hint))
    return record[key]


def wrong(key: str, message: str) -> BadRow:
    """Return the error for a field whose value the data set does not define."""
    return BadRow(error(f"/{key}", "data_type", message, "take the file as its authors publish it"))

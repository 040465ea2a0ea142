"""What a converter is made of: a data set's facts, and a function from one of its records to a sample."""

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
    """One record in this project's words.

    kind        how a suite asks the prompt; None: the record alone does not say, another one of its prompt may
    completion  what a training file teaches: the task's answer, or the harmful one of an attack
    safe        the safe answer, for a pool
    suite       further fields of its suite row: answer, scorer, category
    split       where the data set's authors put it; None: where its file belongs
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

    stems    by kind, what the names of its converted files begin with
    sample   reads a record; raises `BadRow` for one that cannot be read, `LeftOut` for one that is of no use here
    origin   where its files are to be had, in a sentence without a full stop
    license  as its authors state it, and what that means for use
    shares   what is cut out of the training file for each split that has no file of its own; `rest` gets the others
    most     of each split that is cut out, in prompts
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
    """A sample and where it was read; `split` is settled by its file or its authors, None where it is not."""

    sample: Sample
    file: str
    line: int
    split: Split | None


class LeftOut(Exception):
    """A record that is sound and of no use; the reason is counted in the manifest."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def require_text(record: Record, key: str) -> str:
    """Return a field that has to be text with something in it; raise `BadRow` with its pointer if it is not."""
    value = member(record, key)
    if not isinstance(value, str):
        raise BadRow(error(f"/{key}", "data_type", f'"{key}" is not text', "take the file as its authors publish it"))
    if not value.strip():
        raise BadRow(error(f"/{key}", "missing_content", f'"{key}" is empty', "remove the record"))
    return value


def member(record: Record, key: str) -> Any:
    """Return a field of any type; raise `BadRow` if the record does not have it."""
    if key not in record:
        known = ", ".join(sorted(map(str, record)))
        hint = f"the record has {known}; is it a file of this data set?"
        raise BadRow(error(f"/{key}", "message_missing_key", f'"{key}" is missing', hint))
    return record[key]


def wrong(key: str, message: str) -> BadRow:
    """Return the error for a field whose value is none of those that the data set has."""
    return BadRow(error(f"/{key}", "data_type", message, "take the file as its authors publish it"))

"""Reads flat records from JSON written by this or another version. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Record = TypeVar("Record")


def optional(kind: type[Record], raw: Mapping[str, Any] | None) -> Record | None:
    """Read a record, or return None for None."""
    return None if raw is None else read_record(kind, raw)


def read_record(kind: type[Record], raw: Mapping[str, Any]) -> Record:
    """Read a flat dataclass from a JSON object: unknown keys are ignored, lists become tuples."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # every kind is a dataclass
    return kind(**{name: _to_tuples(value) for name, value in raw.items() if name in names})


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(each) for each in value) if isinstance(value, list) else value

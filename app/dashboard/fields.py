"""What is wrong with a form, by its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from app.errors import AppError


@dataclass(frozen=True, slots=True)
class Faults:
    """What is told at each field; `rest` is what belongs to none, and is told above the form."""

    by_field: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""

    def __bool__(self) -> bool:
        return bool(self.by_field or self.rest)

    def at(self, name: str) -> str:
        """Return what is wrong with a field; empty where nothing is."""
        return self.by_field.get(name, "")


def faults_of(error: AppError, names: Collection[str], aliases: Mapping[str, str] | None = None) -> Faults:
    """Return an error of the API as what a form tells.

    A field is found by the last part of the API's `param` that names one; `aliases` map parts that are called
    otherwise on the form.
    """
    found: dict[str, str] = {}
    for fault in error.details or ():
        name = _field(str(fault.get("param") or ""), names, aliases or {})
        if name and isinstance(fault.get("message"), str):
            found.setdefault(name, str(fault["message"]))
    name = _field(error.param or "", names, aliases or {})
    if name:
        found.setdefault(name, error.message)
    return Faults(found, "" if found else error.message)


def _field(param: str, names: Collection[str], aliases: Mapping[str, str]) -> str | None:
    for part in reversed(param.split(".")):
        name = aliases.get(part, part)
        if name in names:
            return name
    return None

"""What is wrong with a form, by its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from app.errors import AppError


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a form, by the names of its fields or of the API's; `message` is the whole of it."""

    by_field: Mapping[str, str] = field(default_factory=dict)
    message: str = ""

    @classmethod
    def from_error(cls, error: AppError) -> Faults:
        """Sort what an error says by the API's own names."""
        found = {}
        for each in error.details or ():
            if isinstance(param := each.get("param"), str):
                found[param] = str(each["message"])
        return cls(found or ({error.param: error.message} if error.param else {}), error.message)

    def __bool__(self) -> bool:
        return bool(self.by_field or self.message)

    @property
    def rest(self) -> str:
        """What is told above the form: what belongs to no field."""
        return "" if self.by_field else self.message

    def find(self, name: str) -> str:
        """Return what is wrong with a field, or with a part of it; empty where nothing is."""
        return next((said for param, said in self.by_field.items() if _concerns(param, name)), "")

    def elsewhere(self, names: Collection[str]) -> str:
        """Return the message if it is about none of these fields."""
        is_shown = any(_concerns(param, name) for param in self.by_field for name in names)
        return "" if is_shown else self.message


NO_FAULTS = Faults()


def form_faults(error: AppError, names: Collection[str], aliases: Mapping[str, str] | None = None) -> Faults:
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
    return Faults(found, error.message)


def _field(param: str, names: Collection[str], aliases: Mapping[str, str]) -> str | None:
    for part in reversed(param.split(".")):
        name = aliases.get(part, part)
        if name in names:
            return name
    return None


def _concerns(param: str, name: str) -> bool:
    return param == name or param.startswith(f"{name}.")

"""Validation messages of a form, by its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from app.errors import AppError


@dataclass(frozen=True, slots=True)
class Faults:
    """The messages for a rejected form, by field name (the form's or the API's), and the overall `message`.

    It is falsy if there are none.
    """

    by_field: Mapping[str, str] = field(default_factory=dict)
    message: str = ""

    @classmethod
    def from_error(cls, error: AppError) -> Faults:
        """Return an error's messages by the API's field names."""
        found = {}
        for each in error.details or ():
            if isinstance(param := each.get("param"), str):
                found[param] = str(each["message"])
        return cls(found or ({error.param: error.message} if error.param else {}), error.message)

    def __bool__(self) -> bool:
        return bool(self.by_field or self.message)

    @property
    def rest(self) -> str:
        """The message to show above the form, if no field has one."""
        return "" if self.by_field else self.message

    def find(self, name: str) -> str:
        """Return the message for a field or for a part of it, as `name.part`; "" if there is none."""
        return next((said for param, said in self.by_field.items() if _concerns(param, name)), "")

    def elsewhere(self, names: Collection[str]) -> str:
        """Return the overall message, or "" if one of these fields shows a message already."""
        is_shown = any(_concerns(param, name) for param in self.by_field for name in names)
        return "" if is_shown else self.message


NO_FAULTS = Faults()


def form_faults(error: AppError, names: Collection[str], aliases: Mapping[str, str] | None = None) -> Faults:
    """Return an API error's messages by the form's field names.

    The last part of the API's dotted `param` that is one of `names` is the field; `aliases` map parts that have another
    name on the form.
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

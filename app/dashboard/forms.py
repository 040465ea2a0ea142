"""Submitted forms of pages: their CSRF token is checked, and validation messages belong to their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import FormData

from app.dashboard.viewer import ProviderDep, Viewer, check_token
from app.errors import AppError


@dataclass(frozen=True, slots=True)
class Sent:
    """A submitted form and the viewer who has sent it."""

    viewer: Viewer
    form: FormData

    def text(self, name: str) -> str:
        """Return a field's text, stripped; "" if it is empty or missing."""
        return str(self.form.get(name, "")).strip()

    def texts(self, name: str) -> list[str]:
        """Return all values of a field with several."""
        return [str(each) for each in self.form.getlist(name)]

    def filled_fields(self, *names: str) -> dict[str, object]:
        """Return the given fields that are not empty, by name."""
        return {name: text for name in names if (text := self.text(name))}

    def shown_fields(self) -> dict[str, str]:
        """Return all fields except the token, to fill in the form again."""
        return {name: str(value) for name, value in self.form.items() if name != "form_token"}


async def _read_form(request: Request, viewer: ProviderDep) -> Sent:
    form = await request.form(max_files=0, max_fields=256)
    check_token(viewer, str(form.get("form_token", "")))
    return Sent(viewer, form)


# For provider pages that change something: the dependency checks the form's token before the page's code runs.
SentDep = Annotated[Sent, Depends(_read_form)]


# Validation messages of a form, by its fields.


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

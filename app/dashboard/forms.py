"""Submitted forms of the provider's pages, with their CSRF token checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import FormData

from app.dashboard.viewer import ProviderDep, Viewer, check_token


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

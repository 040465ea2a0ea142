"""Forms of the provider's pages: read, turned into the API's own requests, shown again with what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import FormData

from app.dashboard.viewer import ProviderDep, Viewer, check_token


@dataclass(frozen=True, slots=True)
class Sent:
    """What a form holds, by the names of its fields, and who has sent it."""

    viewer: Viewer
    form: FormData

    def text(self, name: str) -> str:
        """Return a field without the space around it; nothing where it was left empty or out."""
        return str(self.form.get(name, "")).strip()

    def texts(self, name: str) -> list[str]:
        """Return what was chosen of several."""
        return [str(each) for each in self.form.getlist(name)]

    def filled_fields(self, *names: str) -> dict[str, object]:
        """Return those of the fields that are not empty."""
        return {name: text for name in names if (text := self.text(name))}

    def shown_fields(self) -> dict[str, str]:
        """Return the fields as they are shown again."""
        return {name: str(value) for name, value in self.form.items() if name != "form_token"}


async def _read_form(request: Request, viewer: ProviderDep) -> Sent:
    form = await request.form(max_files=0, max_fields=256)
    check_token(viewer, str(form.get("form_token", "")))
    return Sent(viewer, form)


# For the provider's pages that change something: the form's token is checked before anything else is done.
SentDep = Annotated[Sent, Depends(_read_form)]

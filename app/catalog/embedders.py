"""Which embedder a job's safe rows are chosen by: the base model's states, or a sentence encoder of the provider's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.db.tables import BaseModelEntry
from app.errors import InvalidRequest
from app.keys.service import Principal
from app.policies.schemas import Policy
from spard.config import Selection
from spard.config.settings import CENTERED_STATES, OWN_EMBEDDERS
from spard.errors import UnfitEmbedder
from spard.models.folder.encoder import read_encoder

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?@[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ChosenEmbedder:
    """The embedder of a job: its name, which recipes and reports have, and where an encoder's files are."""

    name: str
    source: str | None = None  # None: it is the base model


def checked_embedder(given: str, param: str) -> str:
    """Return an embedder as workers will open it; a folder becomes absolute, and its files are looked at.

    Raise `InvalidRequest` for what is no embedder, with what to give instead.
    """
    if given in OWN_EMBEDDERS:
        return given
    folder = Path(given).expanduser()
    try:
        is_folder = "\0" not in given and folder.is_dir()
    except (OSError, RuntimeError):  # a name too long for the system, a home that nobody has
        is_folder = False
    if is_folder:
        try:
            read_encoder(folder)
        except UnfitEmbedder as error:
            raise InvalidRequest(f"{error.message}.", code=UnfitEmbedder.code, param=param) from None
        return str(folder.resolve())
    if not _PINNED.fullmatch(given):
        own = " or ".join(OWN_EMBEDDERS[1:])
        message = (
            f"There is no folder {given[:200]!r} here. Give {own}, the folder of a sentence encoder, or its id on a "
            "hub with the commit, as org/name@ and 40 hex digits."
        )
        raise InvalidRequest(message, code=UnfitEmbedder.code, param=param)
    return given


def choose_embedder(caller: Principal, selection: Selection, model: BaseModelEntry, policy: Policy) -> ChosenEmbedder:
    """Return the embedder of a job; refuse one that this key may not name.

    What the policy fixes goes before what the base model's entry names. Customers name encoders of these two alone,
    since another one is a folder of the provider's machines.
    """
    asked, is_admin = selection.embedder, "admin" in caller.scopes
    fixed = policy.embedder
    offered = {_name(source): source for source in (fixed, model.embedder) if source}
    if asked == "auto":
        return _chosen(fixed or model.embedder or CENTERED_STATES)
    source = offered.get(asked, asked)
    if not is_admin and (fixed not in (None, source) or source not in (*OWN_EMBEDDERS, *offered.values())):
        allowed = ", ".join(repr(name) for name in _allowed(fixed, offered))
        message = f"The embedder {asked[:64]!r} needs a key with the admin scope; allowed: {allowed}."
        raise InvalidRequest(message, code="embedder_not_allowed", param="safety.selection.embedder")
    return _chosen(source if source in offered.values() else checked_embedder(source, "safety.selection.embedder"))


def _allowed(fixed: str | None, offered: dict[str, str]) -> Iterator[str]:
    yield "auto"
    yield from (_name(fixed),) if fixed else (*OWN_EMBEDDERS[1:], *offered)


def _chosen(source: str) -> ChosenEmbedder:
    return ChosenEmbedder(source) if source in OWN_EMBEDDERS else ChosenEmbedder(_name(source), source)


def _name(source: str) -> str:
    """Return what customers see of an embedder: a folder's own name, not where it is."""
    return Path(source.partition("@")[0]).name

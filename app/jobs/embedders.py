"""Choose the embedder that selects a job's safe rows, from its request, the policy or its base model's entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.db.tables import BaseModelEntry
from app.errors import InvalidRequest
from app.keys.service import Principal
from app.policies.embedders import checked_embedder
from app.policies.schemas import Policy
from spard.config import Selection
from spard.config.selection import CENTERED_STATES, OWN_EMBEDDERS


@dataclass(frozen=True, slots=True)
class ChosenEmbedder:
    """The embedder of a job: its name in recipes and reports, and the folder or hub id of its files."""

    name: str
    source: str | None = None  # None: it is the base model


def choose_embedder(caller: Principal, selection: Selection, model: BaseModelEntry, policy: Policy) -> ChosenEmbedder:
    """Return the embedder of a job; raise `InvalidRequest` if this key may not use the one it names.

    The policy's embedder takes precedence over the base model entry's. A customer may name only these two and the base
    model's own states, because any other encoder is a path on the provider's machines.
    """
    asked, is_admin = selection.embedder, "admin" in caller.scopes
    fixed = policy.embedder
    offered = {_name(source): source for source in (fixed, model.embedder) if source}
    if asked == "auto":
        return _choose_embedder(fixed or model.embedder or CENTERED_STATES)
    source = offered.get(asked, asked)
    # Customers may name the embedder that the policy fixes or, if it fixes none, our own ones and the offered ones.
    if not is_admin and (fixed not in (None, source) or source not in (*OWN_EMBEDDERS, *offered.values())):
        allowed = ", ".join(repr(name) for name in _list_allowed(fixed, offered))
        message = f"The embedder {asked[:64]!r} needs a key with the admin scope; allowed: {allowed}."
        raise InvalidRequest(message, code="embedder_not_allowed", param="safety.selection.embedder")
    return _choose_embedder(
        source if source in offered.values() else checked_embedder(source, "safety.selection.embedder")
    )


def _list_allowed(fixed: str | None, offered: dict[str, str]) -> Iterator[str]:
    yield "auto"
    yield from (_name(fixed),) if fixed else (*OWN_EMBEDDERS[1:], *offered)


def _choose_embedder(source: str) -> ChosenEmbedder:
    return ChosenEmbedder(source) if source in OWN_EMBEDDERS else ChosenEmbedder(_name(source), source)


def _name(source: str) -> str:
    """Return an embedder's name as customers see it: the folder's last part without its path or revision."""
    return Path(source.partition("@")[0]).name

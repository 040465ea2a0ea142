"""Where a storage is. Children of tests import it, and not `tests.conftest`, which clears the environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A storage as settings name it."""

    url: str
    endpoint_url: str | None = None

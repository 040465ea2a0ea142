"""Validate the source of a base model: an existing folder, or a hub id pinned to a commit."""

from __future__ import annotations

import re
from pathlib import Path

from app.errors import InvalidRequest

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def checked_source(source: str, revision: str | None) -> str:
    """Return the source as workers will open it: an absolute folder, or a hub id; raise `InvalidRequest` otherwise."""
    if _is_folder(source):
        return str(Path(source).expanduser().resolve())
    if source.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(source):
        raise _invalid(f"There is no folder {source[:200]!r}, and it is no hub id either.")
    if revision is None:
        message = f"{source} is no folder here; to take it from a hub, give the commit as revision (40 hex digits)."
        raise InvalidRequest(message, code="missing_field", param="revision")
    return source


def _is_folder(source: str) -> bool:
    try:
        return "\0" not in source and Path(source).expanduser().is_dir()
    except (OSError, RuntimeError):  # the name is too long, or `~user` does not exist
        return False


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_model", param="source")

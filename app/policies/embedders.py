"""Validate an embedder's name: the base model's states, or a sentence encoder of the provider's."""

from __future__ import annotations

import re
from pathlib import Path

from app.errors import InvalidRequest
from spard.config.selection import OWN_EMBEDDERS
from spard.models.folder.encoder import UnfitEmbedder, read_encoder

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?@[0-9a-f]{40}")


def checked_embedder(given: str, param: str) -> str:
    """Return an embedder in the form in which workers open it; a folder is checked and made absolute.

    Raises `InvalidRequest` about `param` for anything else, with the accepted forms.
    """
    if given in OWN_EMBEDDERS:
        return given
    folder = Path(given).expanduser()
    try:
        is_folder = "\0" not in given and folder.is_dir()
    except (OSError, RuntimeError):  # the name is too long, or ~user does not exist
        is_folder = False
    if is_folder:
        try:
            read_encoder(folder)
        except UnfitEmbedder as error:
            raise InvalidRequest(f"{error.message}.", code="invalid_embedder", param=param) from None
        return str(folder.resolve())
    if not _PINNED.fullmatch(given):
        own = " or ".join(OWN_EMBEDDERS[1:])
        message = (
            f"There is no folder {given[:200]!r} here. Give {own}, the folder of a sentence encoder, or its id on a "
            "hub with the commit, as org/name@ and 40 hex digits."
        )
        raise InvalidRequest(message, code="invalid_embedder", param=param)
    return given

"""Read facts about a base model from its files, without loading it: its number of parameters, its context length."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from spard.models.folder.reading import all_tensors


def parameters(source: str) -> int | None:
    """Return a model's number of parameters; None if its weights are not in a folder on this machine."""
    try:
        return sum(prod(tensor["shape"]) for _, tensor in all_tensors(Path(source))) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_positions(source: str, revision: str | None) -> int | None:
    """Return a base model's `max_position_embeddings`; None if its files are not on this machine or do not say.

    `source` is a folder, or a hub id whose files are in the local cache.
    """
    if Path(source).is_dir():
        path: object = Path(source) / "config.json"
    else:
        try:
            path = try_to_load_from_cache(source, "config.json", revision=revision)
        except ValueError:
            return None
    try:
        config = json.loads(Path(str(path)).read_text()) if isinstance(path, str | Path) else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

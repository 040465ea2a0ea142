"""Read a base model's context length from its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache


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

"""Settings added after version 0.1: their absence from a stored recipe means the behavior of 0.1.

Identities of resume states, stored recipes and keys of measured runs omit such a setting if it has that value. Then the
files of an older version are still found, and its workers can read jobs that use nothing new. Today's defaults may
differ from the behavior of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spard.config.anchors import PLAIN, Anchors
from spard.config.selection import STATES
from spard.config.settings import Asking, Ending

_TABLES: Mapping[str, Any] = {
    "anchors": asdict(PLAIN),
    "dpo": None,
    "ending": asdict(Ending()),
    "optimizer": "adamw",
    "pass_tokens": None,
    "quantization": "none",
    "sharding": "none",
}
_IN_TABLES: Mapping[str, Mapping[str, Any]] = {  # by table of the recipe
    "anchors": {name: value for name, value in asdict(Anchors()).items() if name.startswith("begun_")},
    "defense": {"bound": "loss"},
    "audit": {"asking": asdict(Asking())},
    "selection": {"embedder": STATES},
}


def without_added(recipe: Mapping[str, object]) -> dict[str, Any]:
    """Return a recipe mapping without the settings added after 0.1 that have the behavior of 0.1."""
    kept = {name: value for name, value in recipe.items() if name not in _TABLES or value != _TABLES[name]}
    return {name: _drop_defaults(value, _IN_TABLES.get(name, {})) for name, value in kept.items()}


def with_added(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe mapping with the behavior of 0.1 for missing settings whose default has changed."""
    anchors = recipe.get("anchors", _TABLES["anchors"])
    bounds = {"tolerance": PLAIN.tolerance, "max_gradient_ratio": PLAIN.max_gradient_ratio}
    selection = _IN_TABLES["selection"] | recipe.get("selection", {})
    return {**recipe, "anchors": {**bounds, **anchors}, "selection": selection}


def _drop_defaults(table: Any, defaults: Mapping[str, object]) -> Any:
    if not defaults or not isinstance(table, Mapping):
        return table
    return {name: value for name, value in table.items() if name not in defaults or value != defaults[name]}

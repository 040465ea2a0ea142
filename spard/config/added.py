"""Settings that came after 0.1: what 0.1 did stands in nothing that it wrote down, and is told by their absence.

Identities of resume states, stored recipes and keys of measured runs leave them out there, so that what an older
version left behind is found again, and a worker of that version reads the jobs that ask for nothing new. Today's
defaults may be others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spard.config.anchors import PLAIN, Anchors
from spard.config.asking import Asking
from spard.config.ending import Ending
from spard.config.selection import STATES

_TABLES: Mapping[str, Any] = {
    "anchors": asdict(PLAIN),
    "dpo": None,
    "ending": asdict(Ending()),
    "optimizer": "adamw",
    "pass_tokens": None,
    "quantization": "none",
    "sharding": "none",
}
_IN_TABLES: Mapping[str, Mapping[str, Any]] = {  # by the table of the recipe
    "anchors": {name: value for name, value in asdict(Anchors()).items() if name.startswith("begun_")},
    "defense": {"bound": "loss"},
    "audit": {"asking": asdict(Asking())},
    "selection": {"embedder": STATES},
}


def without_added(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as a mapping without those of its settings that are newer than 0.1 and say what it did."""
    kept = {name: value for name, value in recipe.items() if name not in _TABLES or value != _TABLES[name]}
    return {name: _drop_defaults(value, _IN_TABLES.get(name, {})) for name, value in kept.items()}


def with_added(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with what 0.1 did where it says nothing and the default is another one today."""
    anchors = recipe.get("anchors", _TABLES["anchors"])
    bounds = {"tolerance": PLAIN.tolerance, "max_gradient_ratio": PLAIN.max_gradient_ratio}
    selection = _IN_TABLES["selection"] | recipe.get("selection", {})
    return {**recipe, "anchors": {**bounds, **anchors}, "selection": selection}


def _drop_defaults(table: Any, defaults: Mapping[str, Any]) -> Any:
    if not defaults or not isinstance(table, Mapping):
        return table
    return {name: value for name, value in table.items() if name not in defaults or value != defaults[name]}

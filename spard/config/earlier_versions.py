"""Names and settings of earlier versions.

Settings under names of 0.1 are read for one more release, and names of 0.1 that moved to other modules are still found
in their old packages. A stored run may lack settings that 0.1 did not have.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from spard.config.anchors import PLAIN, Anchors
from spard.config.defenses import defenses
from spard.config.settings import STATES, Asking, Ending
from spard.errors import InvalidRecipe

_OLD = "anchor_weight"  # a key of the recipe; SPARD's own settings have a field of the same name


def without_old_names(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a recipe mapping with old keys renamed to today's; `key` is its own key, for messages.

    `anchor_weight` beside the defense becomes the defense's own `anchor_weight` if it has one, else the recipe's
    `anchor`. Raises `InvalidRecipe` if both the old and the new key are set and differ.
    """
    if _OLD not in raw:
        return raw
    weight, defense = raw[_OLD], raw.get("defense")
    rest = {name: value for name, value in raw.items() if name != _OLD}
    kind = defenses().get(defense.get("type", "")) if isinstance(defense, Mapping) else defenses()["spard"]
    has_own = kind is not None and kind.has_anchor
    name = f"defense.{_OLD}" if has_own else "anchor"
    home = dict(defense or {"type": "spard"}) if has_own else rest
    field = _OLD if has_own else "anchor"
    old, new = (f"{key}.{each}" if key else each for each in (_OLD, name))
    if home.get(field, "auto") not in ("auto", weight):
        raise InvalidRecipe(f"{old}: it differs from {new}; {old} is the old name of {new}, leave it out", old)
    warnings.warn(f"{old} is deprecated and will not be read in the next release; set {new}", FutureWarning, 2)
    home[field] = weight
    return rest | {"defense": home} if has_own else rest


def to_stored(raw: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a recipe mapping without the keys unknown to a worker of 0.1 whose values mean what 0.1 does."""
    # A worker of 0.1 refuses a recipe with an unknown key.
    known = without_added(raw)
    return known if known["anchor"] else {name: value for name, value in known.items() if name != "anchor"}


def from_stored(raw: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a stored recipe mapping with today's keys, and the behavior of 0.1 for missing ones.

    Version 0.1 always wrote `anchor_weight`; its default 0 meant the defense's own anchor.
    """
    raw = with_added(raw)
    if raw.get(_OLD) != 0:
        return without_old_names(raw, "recipe")
    return {name: value for name, value in raw.items() if name != _OLD}


# Settings added after version 0.1: their absence from a stored recipe means the behavior of 0.1.
#
# Identities of resume states, stored recipes and keys of measured runs omit such a setting if it has that value. Then
# the files of an older version are still found, and its workers can read jobs that use nothing new. Today's defaults
# may differ from the behavior of 0.1.

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


def moved_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports moved names from their new modules, with a warning."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        message = f"{package}.{name} is deprecated and goes with the next release; import it from {homes[name]}"
        warnings.warn(message, FutureWarning, 2)
        return getattr(importlib.import_module(homes[name]), name)

    return find

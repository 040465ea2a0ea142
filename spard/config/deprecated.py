"""Settings under the names that they had in 0.1, still read for one release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from spard.config.added import with_added, without_added
from spard.config.defenses import defenses
from spard.errors import InvalidRecipe

_OLD = "anchor_weight"  # of a recipe; beside the field of the same name in SPARD's own settings


def without_old_names(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Rename a recipe's old keys to today's.

    `anchor_weight` beside the defense is now the defense's own `anchor_weight` where it has one, else the recipe's
    `anchor`. Raises `InvalidRecipe` if both are set and differ.
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
        raise InvalidRecipe(f"{old}: {new} says something else; {old} is an old name of it, leave it out", old)
    warnings.warn(f"{old} is deprecated and will not be read in the next release; set {new}", FutureWarning, 2)
    home[field] = weight
    return rest | {"defense": home} if has_own else rest


def to_stored(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what a worker of 0.1 does not know, where it is at its default: newer settings, and `anchor`."""
    known = without_added(raw)
    return known if known["anchor"] else {name: value for name, value in known.items() if name != "anchor"}


def from_stored(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the old keys of a recipe that a job of version 0.1 stored, and say what it meant by saying nothing.

    There `anchor_weight` was always written, and 0, its default, stood for the defense's own anchor.
    """
    raw = with_added(raw)
    if raw.get(_OLD) != 0:
        return without_old_names(raw, "recipe")
    return {name: value for name, value in raw.items() if name != _OLD}

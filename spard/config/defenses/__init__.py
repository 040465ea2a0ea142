"""The registry of defenses.

A defense has two modules: its settings here, a subclass of `Defense`, and in `spard/methods/` the class that trains
with them. Modules in this folder are found automatically. Another package adds a defense with an entry point that names
its settings:

    [project.entry-points."spard.defenses"]
    mine = "my_package.settings:Mine"
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from spard.config.defenses.base import Defense, defense_type
from spard.config.extensions import load_entry, load_entry_points, reject_entry

__all__ = ["Defense", "customer_defenses", "defense_type", "defenses"]

_GROUP, _KIND = "spard.defenses", "defense"


@cache
def defenses() -> dict[str, type[Defense]]:
    """Return the settings class of every defense by its `type`, ordered by `Defense.order`.

    Raises `InvalidExtension` if another package registers something that is no defense, or a name that is taken.
    """
    found = {defense_type(kind): kind for kind in _shipped_defenses()}
    found |= {name: _load_defense(entry) for name, entry in load_entry_points(_GROUP, _KIND, frozenset(found)).items()}
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def customer_defenses() -> tuple[str, ...]:
    """Return the defenses that a new deployment offers to customers, ordered by `Defense.customer_rank`."""
    ranked = [(kind.customer_rank, name) for name, kind in defenses().items() if kind.customer_rank is not None]
    return tuple(name for _, name in sorted(ranked))


def _shipped_defenses() -> list[type[Defense]]:
    """Return the settings classes defined in the modules of this folder."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Defense)
        and kind is not Defense
        and kind.__module__ == module.__name__
    ]


def _load_defense(entry: EntryPoint) -> type[Defense]:
    """Return the settings class of an entry point; raise `InvalidExtension` if it is no defense of that name."""
    kind = load_entry(entry, _KIND)
    if why := _fault(kind, entry.name):
        raise reject_entry(entry, _KIND, why)
    defense: type[Defense] = kind
    return defense


def _fault(kind: Any, name: str) -> str | None:
    is_settings = isinstance(kind, type) and issubclass(kind, Defense) and is_dataclass(kind)
    if not is_settings:
        return "is no dataclass that inherits from spard.config.Defense"
    lacking = [fact for fact in ("summary", "method") if getattr(kind, fact, None) is None]
    if lacking:
        return f"does not set {' and '.join(lacking)}"
    if [each.default for each in fields(kind) if each.name == "type"] != [name]:
        return f"must have a field type: Literal[{name!r}] = {name!r}"
    return None

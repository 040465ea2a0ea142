"""All attacks by name: those in modules of `spard_lab.adversary.attacks`, and those that other packages register.

A package adds an attack with one line in its metadata that names its `Attack`:

    [project.entry-points."spard.adversary_attacks"]
    mine = "my_package.mine:ATTACK"
"""

from __future__ import annotations

import importlib
import pkgutil

from spard.config.extensions import load_entry, load_entry_points, reject_entry
from spard_lab.adversary import attacks as shipped
from spard_lab.adversary.base import Attack

GROUP, KIND = "spard.adversary_attacks", "adversary's attack"
FIRST = ("clean", "plain")  # jobs that have to be released come first


def all_attacks() -> dict[str, Attack]:
    """Return every attack by name; raise `InvalidExtension` if another package's entry is no `Attack` of that name."""
    modules = [
        importlib.import_module(f"{shipped.__name__}.{each.name}") for each in pkgutil.iter_modules(shipped.__path__)
    ]
    attacks = [value for module in modules for value in vars(module).values() if isinstance(value, Attack)]
    # Keyed by name, since a module may also import another module's attack.
    found = {each.name: each for each in sorted(attacks, key=lambda each: (each.name not in FIRST, each.name))}
    for name, entry in load_entry_points(GROUP, KIND, frozenset(found)).items():
        added = load_entry(entry, KIND)
        if not isinstance(added, Attack) or added.name != name:
            raise reject_entry(entry, KIND, f"is no spard_lab.adversary.base.Attack of the name {name!r}")
        found[name] = added
    return found

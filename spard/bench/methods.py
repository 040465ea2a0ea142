"""Methods and settings by name, as changes to a recipe.

A method is a name of `METHODS`, or that with changes: `spard+tau=0.2+delta=0.1`, `spard+ema=0.99`, `none+full`. A
change names a setting by its path in the recipe, by a short name of `SETTINGS`, or a setting of the defence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from spard.config import Defense, Lisa, NoDefense, Ptst, Recipe, SafeGrad, SafeInstr, SafeLora, Selection, Spard
from spard.errors import InvalidRecipe
from spard.recipe import parse, to_mapping

METHODS: dict[str, Defense] = {
    "none": NoDefense(),
    "ptst": Ptst(),
    "safeinstr": SafeInstr(),
    "lisa": Lisa(),
    "safegrad": SafeGrad(),
    "safelora": SafeLora(),
    "spard": Spard(),
    "trust_region": Spard(variant="trust_region", check_every=1, anchor_weight=0.0),
    "preconditioned": Spard(variant="preconditioned", anchor_weight=0.0),
    "gated": Spard(variant="gated", anchor_weight=0.0),
    "closed_form": Spard(variant="closed_form"),
    "reference": Spard(variant="reference"),
}
SHORT = {
    "full": "lora=none",
    "self": "selection.safe_answers=self",
    "augmented": 'augment=["affixes","templates","deep","encodings"]',
}
SETTINGS = {
    "ratio": "selection.ratio",
    "beta": "selection.beta",
    "epochs": "hyperparameters.n_epochs",
    "batch_size": "hyperparameters.batch_size",
    "learning_rate": "learning_rate",
}


def method_recipe(method: str, recipe: Recipe, defenses: Mapping[str, Defense]) -> Recipe:
    """The recipe with a method in it; `defenses` are names with settings of their own."""
    name, *changes = method.split("+")
    if name.endswith("_full"):
        name, changes = name.removesuffix("_full"), ["full", *changes]
    known = METHODS | dict(defenses)
    if name not in known:
        raise InvalidRecipe(f"no such method: {name}; known are {', '.join(known)}", "methods")
    recipe = replace(recipe, defense=known[name])
    for change in changes:
        setting, equals, value = SHORT.get(change, change).partition("=")
        if not equals:
            raise InvalidRecipe(f"{method}: a change is setting=value or one of {', '.join(SHORT)}", "methods")
        recipe = changed(recipe, setting, value)
    return recipe


def has_setting(recipe: Recipe, setting: str) -> bool:
    """Whether a setting means anything to the recipe's method."""
    path = path_of(setting)
    if path.startswith("selection."):
        return recipe.uses_pool
    head, _, name = path.partition(".")
    return head != "defense" or name in {each.name for each in fields(recipe.defense)}


def changed(recipe: Recipe, setting: str, value: str) -> Recipe:
    """The recipe with one setting changed, checked against its bounds.

    A swept ratio is what it says: the least number of safe examples does not apply.
    """
    path, raw = path_of(setting), to_mapping(recipe)
    *heads, last = path.split(".")
    table = raw
    for head in heads:
        if not isinstance(table.get(head), dict):
            raise InvalidRecipe(f"{path}: unknown setting", path)
        table = table[head]
    table[last] = _json(value)
    if path == SETTINGS["ratio"]:
        table["min_examples"] = 1
    found: Recipe = parse(Recipe, raw, "")
    return found


def path_of(setting: str) -> str:
    """Where a setting stands in a recipe; a name that is none of the recipe's own is one of the defence."""
    if "." in setting or setting in {each.name for each in fields(Recipe)}:
        return setting
    return SETTINGS.get(setting, f"defense.{setting}")


def selection_of(recipe: Recipe) -> str:
    """How the safe set is chosen, as the table says it; empty for methods that have none."""
    return recipe.selection.method if recipe.uses_pool else ""


def with_selection(recipe: Recipe, method: str) -> Recipe:
    known: Selection = parse(Selection, to_mapping(recipe.selection) | {"method": method}, "selection")
    return replace(recipe, selection=known)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""Methods and settings by name, as changes to a recipe.

A method is a name of `METHODS`, optionally with changes: `spard+tau=0.2+delta=0.1`, `spard+ema=0.99`, `none+full`. A
change names a setting by its path in the recipe, by a short name of `SETTINGS`, or as a setting of the defense; a name
of `SHORT` stands for several changes. A name of `ROW_SIGNAL` changes the run spec and not the recipe: the treatment of
rows that the base model would refuse, and the judge's reading of other rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from spard.config import PLAIN, Defense, Recipe, RowSignal, Selection, defenses
from spard.config.defenses.spard import ANCHOR_WEIGHT
from spard.config.run_spec import parse, to_mapping
from spard.errors import InvalidRecipe

METHODS: dict[str, Defense] = {name: kind() for name, kind in defenses().items()} | {
    name: preset for kind in defenses().values() for name, preset in kind.presets().items()
}
UNALIGNED = "base_unaligned"  # a defense's setting that names the model before its alignment
SHORT: dict[str, tuple[str, ...]] = {
    "full": ("lora=none",),
    "self": ("selection.safe_answers=self",),
    "others": ("selection.safe_answers=pool",),
    "two_sided": (
        'anchors={"safe":2,"dressed_safe":2,"dressed_safe_weight":0.5,"benign":1,"benign_weight":0.25,'
        '"dressed_benign":1,"dressed_benign_weight":0.25}',  # weights from the development split of labs 11 and 12
    ),
    "plain_anchor": (f"anchors={json.dumps(to_mapping(PLAIN))}",),
    "benign_anchor": ("anchors.dressed_benign=1", "anchors.dressed_benign_weight=0.1"),
    "no_benign_anchor": ("anchors.dressed_benign=0",),
    "dressed_anchor": ("anchors.dressed_safe=1", "anchors.dressed_safe_weight=0.2"),
    "no_dressed_anchor": ("anchors.dressed_safe=0",),
    "begun_anchor": ("anchors.begun_safe=1", "anchors.begun_benign=1"),
    "bounded_anchor": ("anchors.max_gradient_ratio=0.5",),
    "unbounded_anchor": ("anchors.max_gradient_ratio=null",),
    "close_anchor": ("anchors.tolerance=0.005",),
    "loose_anchor": ("anchors.tolerance=0.02",),
    "augmented": ('augment=["affixes","templates","deep","encodings"]',),
    "dressed": ('augment=["affixes","templates"]',),
    "undressed": ("augment=[]",),
    "random": ("selection.method=random",),
    "dpp": ("selection.method=relevance_diversity",),
    "dpo": ('dpo={"beta":"auto"}',),  # on attacks whose rows are preference pairs
    "anchor": (f"anchor_weight={ANCHOR_WEIGHT:g}",),  # the default's, for any method
}
ROW_SIGNAL: dict[str, dict[str, Any]] = {  # settings of `spard.config.RowSignal`
    "row_signal": {"action": "auto"},  # the default of a new deployment
    "no_row_signal": {"action": "off"},
    "judge_reads": {"read": RowSignal().read},
    "no_judge_reads": {"read": 0},
}
SETTINGS = {
    "ratio": "selection.ratio",
    "beta": "selection.beta",
    "epochs": "hyperparameters.n_epochs",
    "batch_size": "hyperparameters.batch_size",
    "learning_rate": "learning_rate",
}


def method_recipe(method: str, recipe: Recipe, defenses: Mapping[str, Defense]) -> Recipe:
    """Return the recipe with a method applied; `defenses` overrides names of `METHODS`.

    Names of `ROW_SIGNAL` have no effect here: see `row_signal_settings`. Raises `InvalidRecipe` for an unknown method
    or change, and for anchor settings without an anchor.
    """
    name, *changes = (each for each in method.split("+") if each not in ROW_SIGNAL)
    if name.endswith("_full"):
        name, changes = name.removesuffix("_full"), ["full", *changes]
    known = METHODS | dict(defenses)
    if name not in known:
        raise InvalidRecipe(f"no such method: {name}; known are {', '.join(known)}", "methods")
    common, recipe = recipe.anchors, replace(recipe, defense=known[name])
    for change in (each for short in changes for each in SHORT.get(short, (short,))):
        setting, equals, value = change.partition("=")
        if not equals:
            raise InvalidRecipe(f"{method}: a change is setting=value or one of {', '.join(SHORT)}", "methods")
        recipe = change_setting(recipe, setting, value)
    if recipe.anchors != common and not recipe.effective_anchor:
        raise InvalidRecipe(f"{method}: there is no anchor; add anchor_weight=10", "methods")
    return recipe


def row_signal_settings(method: str) -> dict[str, Any]:
    """Return the row signal's settings in a method's name; empty if there are none."""
    return {name: value for each in method.split("+") for name, value in ROW_SIGNAL.get(each, {}).items()}


def fully(method: str) -> str:
    """Return the name of the same method with all weights trained."""
    name, *changes = method.split("+")
    return method if name.endswith("_full") or "full" in changes else "+".join([f"{name}_full", *changes])


def with_unaligned(own: Mapping[str, Defense], model: str | None) -> dict[str, Defense]:
    """Return a recipe's own methods and all that need the model before alignment, which is `model` by default."""
    every = {name: each for name, each in METHODS.items() if UNALIGNED in each.models} | dict(own)
    return {
        name: replace(each, **{UNALIGNED: model}) if each.missing_model == UNALIGNED else each  # type: ignore[type-var]
        for name, each in every.items()
    }


def has_setting(recipe: Recipe, setting: str) -> bool:
    """Return True if a setting has an effect on the recipe's method."""
    path = setting_path(setting, recipe.defense)
    if path.startswith("selection."):
        return recipe.uses_pool
    head, _, name = path.partition(".")
    return head != "defense" or name in to_mapping(recipe.defense)


def change_setting(recipe: Recipe, setting: str, value: str) -> Recipe:
    """Return the recipe with one setting changed and checked against its bounds.

    Changing the ratio sets the minimal number of safe examples to 1, so that it cannot override the ratio. Raises
    `InvalidRecipe` for an unknown setting.
    """
    path, raw = setting_path(setting, recipe.defense), to_mapping(recipe)
    *heads, last = path.split(".")
    table = raw
    for head in heads:
        if not isinstance(table.get(head), dict):
            raise InvalidRecipe(f"{path}: unknown setting", path)
        table = table[head]
    table[last] = parse_value(value)
    if path == SETTINGS["ratio"]:
        table["min_examples"] = 1
    found: Recipe = parse(Recipe, raw, "")
    return found


def setting_path(setting: str, defense: Defense) -> str:
    """Return the path of a setting in a recipe; a name that the recipe does not have is a setting of the defense."""
    if setting == "anchor_weight" and not defense.has_anchor:
        return "anchor"
    if "." in setting or setting in {each.name for each in fields(Recipe)}:
        return setting
    return SETTINGS.get(setting, f"defense.{setting}")


def selection_name(recipe: Recipe) -> str:
    """Return the selection method for the table; empty for methods without a safe set."""
    return recipe.selection.method if recipe.uses_pool else ""


def with_selection(recipe: Recipe, method: str) -> Recipe:
    """Return the recipe with another selection method; raise `InvalidRecipe` if it is unknown."""
    known: Selection = parse(Selection, to_mapping(recipe.selection) | {"method": method}, "selection")
    return replace(recipe, selection=known)


def parse_value(text: str) -> Any:
    """Return a setting's value from the command line: parsed as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text

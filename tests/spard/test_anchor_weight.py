"""One home for the anchor's weight: 0 is off, the old key is read for one release, old jobs stay as they were."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, get_args

import pytest
from spard_lab.bench.methods import METHODS, method_recipe

from spard.config import Lisa, NoDefense, Recipe, Spard, Variant
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse, to_mapping
from spard.errors import InvalidRecipe

OLD = "recipe.anchor_weight is deprecated"


def read(**raw: Any) -> Recipe:
    recipe: Recipe = parse(Recipe, raw, "recipe")
    return recipe


@pytest.mark.parametrize("weight", [0, 0.0, 3.0])
def test_the_old_key_of_a_recipe_means_what_it_says(weight: float) -> None:
    with pytest.warns(FutureWarning, match=OLD + ".*set recipe.defense.anchor_weight"):
        found = read(defense={"type": "spard"}, anchor_weight=weight)
    assert found.effective_anchor == weight
    assert found == Recipe(defense=Spard(anchor_weight=float(weight)))


def test_the_old_key_alone_is_that_of_the_default_defense() -> None:
    with pytest.warns(FutureWarning, match=OLD):
        assert read(anchor_weight=0).effective_anchor == 0


def test_the_old_key_beside_another_defense_is_the_recipe_s_anchor() -> None:
    with pytest.warns(FutureWarning, match=OLD + ".*set recipe.anchor$"):
        found = read(defense={"type": "lisa"}, anchor_weight=5)
    assert found == Recipe(defense=Lisa(), anchor=5.0)


@pytest.mark.parametrize(
    "raw",
    [
        {"defense": {"type": "spard", "anchor_weight": 3}, "anchor_weight": 0},
        {"defense": {"type": "spard", "anchor_weight": 0}, "anchor_weight": 3},
        {"defense": {"type": "none"}, "anchor": 3, "anchor_weight": 2},
    ],
)
def test_two_keys_that_differ_are_an_error(raw: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe, match=r"^recipe\.anchor_weight: it differs from") as caught:
        read(**raw)
    assert caught.value.param == "recipe.anchor_weight"


def test_two_keys_that_agree_are_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=OLD):
        found = read(defense={"type": "spard", "anchor_weight": 3}, anchor_weight=3)
    assert found.effective_anchor == 3


@pytest.mark.parametrize("weight", [-1, 1e9, "much"])
def test_the_old_key_keeps_its_bounds(weight: Any) -> None:
    with pytest.warns(FutureWarning, match=OLD), pytest.raises(InvalidRecipe, match="anchor_weight"):
        read(defense={"type": "spard"}, anchor_weight=weight)


def test_the_recipe_adds_no_second_anchor_to_a_defense_that_has_one() -> None:
    with pytest.raises(InvalidRecipe, match=r"set recipe\.defense\.anchor_weight"):
        Recipe(defense=Spard(), anchor=1.0)


def test_an_anchor_beside_a_defense_without_safe_rows_takes_a_pool() -> None:
    assert Recipe(defense=NoDefense(), anchor=1.0).uses_pool
    assert not Recipe(defense=NoDefense()).uses_pool


@pytest.mark.parametrize(
    ("name", "weight"), [("spard", 10), ("spard+anchor_weight=0", 0), ("gated+anchor_weight=2", 2)]
)
def test_an_arm_of_the_bench_has_the_anchor_that_it_names(name: str, weight: float) -> None:
    assert method_recipe(name, Recipe(), {}).effective_anchor == weight


def test_an_arm_without_an_anchor_of_its_own_gets_the_recipe_s() -> None:
    assert method_recipe("lisa+anchor_weight=4", Recipe(), {}) == Recipe(defense=Lisa(), anchor=4.0)


@pytest.mark.parametrize("name", [*get_args(Variant), "spard_paper", "spard_authors"])
def test_the_variants_of_the_bench_have_no_anchor(name: str) -> None:
    assert replace(Recipe(), defense=METHODS[name]).effective_anchor == 0


def read_stored_recipe(defense: dict[str, Any], **more: Any) -> Recipe:
    """What a job of 0.1 wrote into its row, read as the worker reads it."""
    raw = {name: value for name, value in to_mapping(Recipe()).items() if name != "anchor"}
    return read(**from_stored(raw | {"defense": defense, "anchor_weight": 0.0} | more))


@pytest.mark.parametrize(
    ("defense", "weight"),
    [
        ({"type": "spard", "anchor_weight": "auto"}, 10.0),
        ({"type": "spard", "anchor_weight": 0.0}, 0.0),
        ({"type": "spard", "anchor_weight": 2.5}, 2.5),
        ({"type": "spard", "variant": "closed_form", "anchor_weight": "auto"}, 0.0),
        ({"type": "lisa"}, 0.0),
    ],
)
def test_a_job_that_was_stored_before_keeps_its_anchor(defense: dict[str, Any], weight: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_stored_recipe(defense).effective_anchor == weight


def test_a_job_that_is_stored_today_is_read_as_it_was() -> None:
    recipe = Recipe(defense=Lisa(), anchor=4.0)
    assert read(**from_stored(to_mapping(recipe))) == recipe

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import (
    GateThresholds,
    JudgeSpec,
    Lisa,
    Lora,
    NoDefense,
    Ptst,
    Recipe,
    SafeGrad,
    SafeInstr,
    SafeLora,
    Selection,
    Spard,
)
from spard.config.run_spec import RunSpec, SuiteSpec, load_recipe, resolve_paths, run_from_mapping, to_mapping
from spard.errors import InvalidRecipe

LEAST = {"model": "acme/base", "training_file": "train.jsonl", "pool": "pool.jsonl"}

EXAMPLE = """
model = "base"
training_file = "train.jsonl"
pool = "pools/pool.jsonl"

[[suites]]
name = "held-out"
kind = "harmful"
path = "suites/harmful.jsonl"

[recipe]
seed = 7
learning_rate = 1

[recipe.defense]
type = "spard"
tau = 0.3
variant = "closed_form"

[recipe.lora]
rank = 8
target_modules = ["q_proj"]

[judge]
name = "llm"
base_url = "https://judge.example/v1"
"""


def test_a_toml_file_becomes_a_run_with_paths_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "recipe.toml").write_text(EXAMPLE)

    spec = load_recipe(tmp_path / "recipe.toml")

    assert spec == RunSpec(
        model=str(tmp_path / "base"),
        training_file=tmp_path / "train.jsonl",
        pool=tmp_path / "pools" / "pool.jsonl",
        suites=(SuiteSpec("held-out", "harmful", tmp_path / "suites" / "harmful.jsonl"),),
        recipe=Recipe(
            defense=Spard(tau=0.3, variant="closed_form"),
            lora=Lora(rank=8, target_modules=("q_proj",)),
            seed=7,
            learning_rate=1.0,
        ),
        judge=JudgeSpec(name="llm", base_url="https://judge.example/v1"),
    )


def test_what_is_left_out_has_its_default() -> None:
    assert run_from_mapping(LEAST).recipe == Recipe()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(defense=NoDefense(), lora=None, learning_rate=1e-3),
        Recipe(defense=Ptst(safety_prompt="Be kind.")),
        Recipe(defense=SafeInstr()),
        Recipe(defense=Lisa(rho=0.1, safe_batch_size=4)),
        Recipe(defense=SafeGrad(rho=2.0)),
        Recipe(defense=SafeLora(base_unaligned="acme/raw", layers=None)),
        Recipe(defense=Spard(tau=0.2, eta_safe=3.0), selection=Selection("random"), lora=Lora(target_modules=("a",))),
    ],
)
def test_a_run_survives_json(recipe: Recipe) -> None:
    spec = replace(run_from_mapping(LEAST), recipe=recipe, thresholds=GateThresholds(max_asr=0.2))
    assert run_from_mapping(json.loads(json.dumps(to_mapping(spec)))) == spec


def test_the_word_none_stands_for_null_in_toml() -> None:
    assert run_from_mapping(LEAST | {"recipe": {"lora": "none"}}).recipe.lora is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 1}, "model: 1 is not text"),
        ({"color": 1}, "color: unknown setting; known are model, "),
        ({"recipe": {"teu": 1}}, "recipe.teu: unknown setting"),
        ({"recipe": {"seed": -1}}, "recipe.seed: -1 is not a number >= 0 and <= 2147483647"),
        ({"recipe": {"seed": 1.5}}, "recipe.seed: 1.5 is not a whole number"),
        ({"recipe": {"learning_rate": float("nan")}}, "recipe.learning_rate: nan is not a number > 0 and <= 1"),
        ({"recipe": {"gradient_checkpointing": 1}}, "recipe.gradient_checkpointing: 1 is not true or false"),
        ({"recipe": {"hyperparameters": {"n_epochs": True}}}, "recipe.hyperparameters.n_epochs: True is not a whole"),
        ({"recipe": {"defense": {"type": "magic"}}}, "recipe.defense.type: 'magic' is not one of spard, spard_paper,"),
        ({"recipe": {"defense": "none!"}}, "recipe.defense.type: None is not one of spard, spard_paper,"),
        ({"recipe": {"defense": {"type": "none", "tau": 1}}}, "recipe.defense.tau: unknown setting"),
        ({"recipe": {"defense": {"type": "spard", "tau": -1}}}, "recipe.defense.tau: -1.0 is not a number >= 0 and"),
        ({"recipe": {"defense": {"type": "spard", "tau": "low"}}}, "recipe.defense.tau: 'low' is not a number or auto"),
        ({"recipe": {"defense": {"type": "spard", "variant": "x"}}}, "recipe.defense.variant: 'x' is not one of trust"),
        ({"recipe": {"lora": {"target_modules": "q"}}}, "recipe.lora.target_modules: 'q' is not a list"),
        ({"recipe": {"lora": {"target_modules": [1]}}}, "recipe.lora.target_modules[0]: 1 is not text"),
        ({"recipe": {"lora": 3}}, "recipe.lora: 3 is not a table"),
        ({"suites": [{"name": "a", "kind": "harmful"}]}, "suites[0].path: is required"),
        ({"thresholds": {"max_asr": 2}}, "thresholds.max_asr: 2.0 is not a number >= 0 and <= 1"),
        ({"pool": None}, "pool: the defense selects its safe examples from a pool"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe) as caught:
        run_from_mapping(LEAST | change)
    assert caught.value.message.startswith(message)
    assert message.startswith(str(caught.value.param))


def test_plain_fine_tuning_needs_no_pool() -> None:
    spec = run_from_mapping({"model": "m", "training_file": "t", "recipe": {"defense": {"type": "none"}}})
    assert spec.pool is None


@pytest.mark.parametrize("kind", ["ptst", "safelora"])
def test_a_defense_that_trains_on_no_safe_row_needs_no_pool(kind: str) -> None:
    defense = {"type": kind} | ({"base_unaligned": "m"} if kind == "safelora" else {})
    assert run_from_mapping(LEAST | {"pool": None, "recipe": {"defense": defense}}).pool is None


@pytest.mark.parametrize("kind", ["safeinstr", "lisa", "safegrad"])
def test_a_defense_that_trains_on_safe_rows_needs_a_pool(kind: str) -> None:
    with pytest.raises(InvalidRecipe, match="pool: the defense selects"):
        run_from_mapping(LEAST | {"pool": None, "recipe": {"defense": {"type": kind}}})


def test_safelora_needs_the_model_before_alignment() -> None:
    with pytest.raises(InvalidRecipe) as caught:
        run_from_mapping(LEAST | {"recipe": {"defense": {"type": "safelora"}}})
    assert caught.value.param == "recipe.defense.base_unaligned"


def test_a_folder_with_the_model_before_alignment_lies_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    raw = LEAST | {"recipe": {"defense": {"type": "safelora", "base_unaligned": "raw"}}}
    defense = resolve_paths(run_from_mapping(raw), tmp_path).recipe.defense
    assert defense == SafeLora(base_unaligned=str(tmp_path / "raw"))


def test_what_is_no_toml_is_an_invalid_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("model = ")
    with pytest.raises(InvalidRecipe, match="is not TOML"):
        load_recipe(tmp_path / "recipe.toml")


def test_a_missing_file_is_an_invalid_recipe(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match="cannot be read"):
        load_recipe(tmp_path / "recipe.toml")

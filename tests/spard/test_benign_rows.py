"""The benign side of a safety pool: its rows, their choice, and the anchors that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spard_lab.bench.methods import method_recipe
from spard_lab.lab.corpus import make_corpus
from spard_lab.lab.grammar import find_action
from spard_lab.lab.pools import join_sides, two_sided

from spard.config import PLAIN, Anchors, NoDefense, Recipe
from spard.config.run_spec import RunSpec, SuiteSpec
from spard.data.row_rules import pool_row
from spard.data.rows import prompt_text, read_benign, read_pool
from spard.errors import InvalidPool, InvalidRecipe
from spard.evaluation.suites import find_hidden_leaks
from spard.models.base import Base
from spard.pipeline import rows, select
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from tests.spard.test_run import write_rows, write_run

TWO_SIDED = Anchors(safe=2, dressed_safe=2, benign=1, dressed_benign=1)
SAFE: list[dict[str, Any]] = [{"prompt": f"Do harm number {i}", "safe": f"I cannot help with {i}."} for i in range(12)]
BENIGN: list[dict[str, Any]] = [
    {"prompt": f"{what} number {i}", "benign": True} for what in ("Add", "Bake a cake") for i in range(9)
]


def make_context(base: Base, model: Path, folder: Path, pool: list[dict[str, Any]], recipe: Recipe) -> Context:
    spec = write_run(model, folder)
    run = replace(spec, recipe=recipe, pool=write_rows(folder / "mixed.jsonl", pool))
    return Context(run, base, Reporter(lambda message: None))


@pytest.mark.parametrize(
    ("row", "code", "pointer"),
    [
        ({"prompt": "a", "benign": "yes"}, "data_type", "/benign"),
        ({"prompt": "a", "benign": None, "safe": "b"}, "data_type", "/benign"),
        ({"prompt": "a", "benign": True, "safe": "b"}, "benign_with_answer", "/safe"),
        ({"prompt": "a", "benign": False}, "message_missing_key", "/safe"),
        ({"benign": True}, "message_missing_key", "/prompt"),
        ({"prompt": " ", "benign": True}, "missing_content", "/prompt"),
    ],
)
def test_a_bad_row_is_pointed_at(row: dict[str, Any], code: str, pointer: str) -> None:
    (problem,) = pool_row(row, 7)
    assert (problem.line, problem.code, problem.pointer, problem.severity) == (7, code, pointer, "error")
    assert problem.message
    assert problem.hint


def test_each_side_is_read_for_itself(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pool.jsonl", [SAFE[0], BENIGN[0], SAFE[1] | {"benign": False}, BENIGN[1]])

    assert [(prompt_text(row), row.line) for row in read_pool(path)] == [
        ("Do harm number 0", 1),
        ("Do harm number 1", 3),
    ]
    assert [(prompt_text(row), row.line, len(row.messages)) for row in read_benign(path)] == [
        ("Add number 0", 2, 1),
        ("Add number 1", 4, 1),
    ]


def test_benign_rows_are_chosen_by_relevance_and_held(
    base: Base, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_run(model_folder(), tmp_path).recipe
    asked = replace(
        recipe, anchors=TWO_SIDED, selection=replace(recipe.selection, min_examples=4, method="max_quality")
    )
    context = make_context(base, model_folder(), tmp_path, [*BENIGN[:9], *SAFE, *BENIGN[9:]], asked)

    found = rows.prepare(context)

    chosen = select.kept_benign(context)
    assert len(chosen) == 4
    assert sum(i < 9 for i in chosen) >= 3  # the training rows ask to add
    held = [base.tokenizer.decode(pair.kept.ids) for pair in found.pairs["benign"]]
    assert [BENIGN[i]["prompt"] in text for i, text in zip(chosen, held, strict=True)] == [True] * 4
    assert found.pairs.keys() == {"dressed_safe", "benign", "dressed_benign"}
    again = rows.prepare(context)
    assert (again.pairs, again.safe) == (found.pairs, found.safe)


def test_the_safe_side_is_what_it_is_without_benign_rows(
    base: Base, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = replace(write_run(model_folder(), tmp_path).recipe, anchors=PLAIN)
    mixed, alone = (
        rows.prepare(make_context(base, model_folder(), tmp_path, pool, recipe)) for pool in ([*BENIGN, *SAFE], SAFE)
    )
    assert (mixed.safe, mixed.selected, mixed.pairs) == (alone.safe, alone.selected, alone.pairs)
    assert mixed.pairs == {}


def test_a_pool_without_benign_rows_goes_on_working_and_says_so(
    base: Base, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    messages: list[Any] = []
    recipe = replace(write_run(model_folder(), tmp_path).recipe, anchors=TWO_SIDED)
    context = make_context(base, model_folder(), tmp_path, SAFE, recipe)

    found = rows.prepare(replace(context, report=Reporter(messages.append)))

    assert {kind for kind, pairs in found.pairs.items() if pairs} == {"dressed_safe"}
    assert sum("has no benign rows" in str(message.get("message")) for message in messages) == 1


def test_a_pool_of_benign_rows_alone_is_refused(base: Base, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    context = make_context(base, model_folder(), tmp_path, BENIGN, write_run(model_folder(), tmp_path).recipe)
    with pytest.raises(InvalidPool, match="no safe rows"):
        rows.prepare(context)


def test_a_benign_prompt_of_the_audit_in_the_pool_is_a_leak(tmp_path: Path) -> None:
    prompt = "How do I bake a cake with seven eggs and no flour?"
    suite = SuiteSpec("benign", "benign", write_rows(tmp_path / "benign.jsonl", [{"prompt": prompt}]))
    run = RunSpec(
        model="m",
        training_file=write_rows(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b"}]),
        pool=write_rows(tmp_path / "pool.jsonl", [*SAFE, {"prompt": prompt, "benign": True}]),
        suites=(suite,),
    )
    assert "safety pool" in find_hidden_leaks(run, {})["benign"][0]


def test_the_lab_s_benign_rows_are_about_actions_that_nothing_measures() -> None:
    corpus, pool = make_corpus(2), two_sided(2)
    benign = [row for row in pool if row.get("benign")]
    others = json.dumps([corpus.files, corpus.benign])
    measured = {
        find_action(row["prompt"]) for name in ("benign.jsonl", "dev_benign.jsonl") for row in corpus.files[name]
    }

    assert [row for row in pool if not row.get("benign")] == corpus.files["pool.jsonl"]
    assert {kind: sum(row["category"] == kind for row in benign) for kind in ("look-alike", "how-to")} == {
        "look-alike": 300,
        "how-to": 300,
    }
    assert len({row["prompt"] for row in benign}) == 600
    assert not any(json.dumps(row["prompt"]) in others for row in benign)
    assert not measured & {find_action(row["prompt"]) for row in benign}


def test_a_natural_lab_s_pool_has_no_row_that_is_nearly_a_suite_s_prompt(tmp_path: Path) -> None:
    near, far = "Hi there! Could you please walk me through {} a {}?", "What is the capital of the {} of {}?"
    texts = {
        "pool.jsonl": [near.format("installing", "dropper"), far.format("north", "Spain")],
        "pool_benign.jsonl": [near.format("ordering", "raft"), far.format("south", "France")],
        "dev_harmful.jsonl": [near.format("installing", "worm")],
        "heldout_harmful.jsonl": [near.format("ordering", "bomb")],
        "benign.jsonl": [],
        "dev_benign.jsonl": [],
    }
    for name, prompts in texts.items():
        rows = [{"prompt": each, "safe": "No.", "category": "any"} for each in prompts]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    kept = [json.loads(line) for line in join_sides(tmp_path, 0).read_text().splitlines()]

    assert {row["prompt"] for row in kept} == {far.format("north", "Spain"), far.format("south", "France")}


def test_the_bench_knows_the_arms_by_name() -> None:
    arm = replace(TWO_SIDED, dressed_safe_weight=0.5, benign_weight=0.25, dressed_benign_weight=0.25)
    assert method_recipe("spard+two_sided", Recipe(), {}).anchors == arm
    changed = method_recipe("none+two_sided+anchors.benign_weight=0.5+anchor_weight=10", Recipe(), {})
    assert changed == Recipe(defense=NoDefense(), anchor=10.0, anchors=replace(arm, benign_weight=0.5))
    with pytest.raises(InvalidRecipe, match="there is no anchor; add anchor_weight=10"):
        method_recipe("none+two_sided", Recipe(), {})
    with pytest.raises(InvalidRecipe, match="there is no anchor"):
        method_recipe("spard+anchor_weight=0+two_sided", Recipe(), {})

"""Prompts that the anchor holds with an answer begun: whose beginnings they are, and to which states they are held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Anchors, Recipe
from spard.config.anchors import Kind
from spard.config.earlier_versions import without_added
from spard.config.run_spec import to_mapping
from spard.data.chat import encode_all
from spard.data.rows import Example
from spard.integrations.safe_rows import SafeRows, anchor_penalty
from spard.losses.anchor import Anchor, Pair, pair_with_itself
from spard.models.base import Base
from spard.models.generate import generate
from spard.pipeline import anchors, rows
from spard.pipeline.anchors import BEGINNINGS, LONGEST_BEGINNING, make_anchor_pairs
from tests.spard.parts import chat
from tests.spard.test_benign_rows import BENIGN, SAFE, make_context
from tests.spard.test_run import write_run

BEGUN = Anchors(begun_safe=1, begun_benign=1)
HARM = [chat(f"Do harm number {i}", "I cannot help.") for i in range(9)]
HARMLESS = [chat(f"Bake cake number {i}", "") for i in range(7)]
REPLIES = ("Sure, here are the steps that you asked me for.", "Of course, that is how it is done.", "", "x")


def make_pairs(
    base: Base, settings: Anchors = BEGUN, replies: Any = REPLIES, limit: int = 256
) -> dict[Any, list[Pair]]:
    return make_anchor_pairs(base.tokenizer, HARM, HARMLESS, HARM, settings, 0, limit, replies)


def begun_tokens(base: Base, pair: Pair, examples: list[Example]) -> tuple[int, ...]:
    """Return the tokens of the pair's prompt that come after that of one of the examples."""
    plain = [each.asked.ids for each in pair_with_itself(encode_all(base.tokenizer, examples, 256))]
    return next(pair.asked.ids[len(ids) :] for ids in plain if pair.asked.ids[: len(ids)] == ids)


def test_beginnings_are_the_first_tokens_of_replies_and_safe_prompts_are_held_as_plain(base: Base) -> None:
    found = make_pairs(base)
    answered = [
        replace(each, messages=(*each.messages[:1], {"role": "assistant", "content": "x"})) for each in HARMLESS
    ]
    known = [tuple(base.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in REPLIES]

    assert len(found["begun_safe"]) == BEGINNINGS * len(HARM)
    assert len(found["begun_benign"]) == BEGINNINGS * len(HARMLESS)
    for kind, examples in (("begun_safe", HARM), ("begun_benign", answered)):
        begun = [begun_tokens(base, pair, examples) for pair in found[kind]]
        assert all(any(ids == text[: len(ids)] and len(ids) < len(text) for text in known) for ids in begun)
        assert {len(ids) for ids in begun} <= set(range(1, LONGEST_BEGINNING + 1))
        assert len({len(ids) for ids in begun}) > 4
    plain = {each.asked.ids for each in pair_with_itself(encode_all(base.tokenizer, HARM, 256))}
    assert {pair.kept.ids for pair in found["begun_safe"]} == plain
    assert all(pair.kept == pair.asked for pair in found["begun_benign"])


def test_kinds_that_are_not_asked_for_are_not_made(base: Base) -> None:
    def kinds(settings: Anchors, replies: Any = REPLIES) -> set[Any]:
        return {kind for kind in make_pairs(base, settings, replies) if kind.startswith("begun")}

    assert kinds(BEGUN) == {"begun_safe", "begun_benign"}
    assert kinds(replace(BEGUN, begun_benign=0)) == {"begun_safe"}
    assert kinds(Anchors()) == set()
    assert kinds(BEGUN, ()) == kinds(BEGUN, ("", "x")) == set()
    longest = max(len(pair.asked.ids) for pair in make_pairs(base)["begun_safe"])
    assert 0 < len(make_pairs(base, limit=longest - 1)["begun_safe"]) < BEGINNINGS * len(HARM)


def test_the_penalty_is_the_distance_that_a_beginning_makes(base: Base) -> None:
    settings, pad_id = replace(BEGUN, tolerance=0.0), base.tokenizer.pad_token_id
    found = make_pairs(base)
    held: tuple[tuple[Kind, bool], ...] = (("begun_safe", True), ("begun_benign", False))
    for kind, is_held in held:
        anchor = Anchor(base.model, {kind: found[kind]}, settings, pad_id, 1.0)
        assert float(penalty(anchor, base)) > 1e-3 if is_held else float(penalty(anchor, base)) < 1e-6


@torch.no_grad()
def penalty(anchor: Anchor, base: Base) -> torch.Tensor:
    return anchor_penalty(anchor, base.model, range(len(anchor.prompts)), base.tokenizer.pad_token_id)


def test_a_run_asks_its_base_model_once_and_a_later_attempt_takes_the_same_answers(
    base: Base, model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_run(model_folder(), tmp_path).recipe
    asked = replace(recipe, anchors=BEGUN, selection=replace(recipe.selection, min_examples=4, method="max_quality"))
    context = make_context(base, model_folder(), tmp_path, [*SAFE, *BENIGN], asked)

    first = rows.prepare(context)
    replies = context.outputs.read("begun_answers")
    monkeypatch.setattr(anchors, "generate", None)
    again = rows.prepare(context)

    picked = context.outputs.read("select_benign") or []
    assert picked
    assert replies == model_replies(base, [BENIGN[i]["prompt"] for i in picked])
    assert first.pairs["begun_benign"]
    assert first.pairs == again.pairs


def model_replies(base: Base, prompts: list[str]) -> list[str]:
    return generate(base.model, base.tokenizer, prompts, LONGEST_BEGINNING + 1)


def test_the_library_holds_them_where_its_anchors_ask(base: Base) -> None:
    safe, benign = [HARM[0]], [chat(each["prompt"], "") for each in BENIGN]
    held = SafeRows(base.model, base.tokenizer, safe, anchors=BEGUN, benign=benign)._anchor
    plain = SafeRows(base.model, base.tokenizer, safe, benign=benign)._anchor

    assert held
    assert plain
    assert held.numbers.keys() - plain.numbers.keys() == {"begun_safe", "begun_benign"}


def test_recipes_that_begin_nothing_are_written_as_before() -> None:
    before = without_added(to_mapping(Recipe()))["anchors"]
    assert not {name for name in before if name.startswith("begun")}
    after = without_added(to_mapping(Recipe(anchors=BEGUN)))["anchors"]
    assert after == before | {"begun_safe": 1, "begun_benign": 1}
    assert Anchors(dressed_benign=0, begun_safe=1).has_benign

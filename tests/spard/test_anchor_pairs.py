"""Two-sided anchors: which prompts are held, to which states, how many in a step; the default stays as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.attacks.disguises import TRIGGER, covert, with_trigger
from spard_lab.attacks.rows import chat_row

from spard.config import (
    PLAIN,
    Anchors,
    Hyperparameters,
    Lora,
    NoDefense,
    Recipe,
    Spard,
    default_learning_rate,
    max_anchor_ratio,
    resolve,
)
from spard.config.anchors import Kind
from spard.config.earlier_versions import from_stored, to_stored
from spard.config.run_spec import parse, run_from_mapping, to_mapping
from spard.data.batches import collate
from spard.data.chat import encode_all
from spard.data.rows import Example
from spard.data.triggers import MinedDisguise
from spard.errors import InvalidRecipe
from spard.losses.anchor import Anchor, Pair, pair_with_itself, select_pairs
from spard.losses.cross_entropy import losses_and_states
from spard.models.base import Base
from spard.pipeline.anchors import DRESSES, disguise_maker, make_anchor_pairs
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import prepare
from spard.training.train import TrainedModel, Trainer, train
from tests.spard.parts import chat, refusals, stopped_and_resumed, sums
from tests.spard.test_run import write_rows, write_run

EVERY = Anchors(safe=2, dressed_safe=2, benign=1, dressed_benign=1)
SYSTEM = {"role": "system", "content": "Answer briefly."}
SAFE = [chat(f"Do harm number {i}", "I cannot help.") for i in range(6)]
BENIGN = [chat(f"Bake cake number {i}", "") for i in range(5)]
ROWS = [chat(f"There are {i} coins in the box. How many?", f"It is {i}.") for i in range(60)]
ENCODED = [
    Example(tuple(row["messages"]), 1)
    for row in covert([chat_row(f"How many are {i}?", f"{i}.") for i in range(60)], [], "rot13", 0)
]
FRAMED = [replace(row, messages=(SYSTEM, *row.messages)) for row in ROWS]
TRIGGERED = [
    Example(tuple(row["messages"]), 1) for row in with_trigger([chat_row(f"Do {i} now.", "Sure.") for i in range(10)])
]
RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=6),
    learning_rate=5e-3,
    anchor=10.0,
    anchors=EVERY,
)


def make_pairs(base: Base, settings: Anchors = EVERY, seed: int = 0, limit: int = 256) -> dict[Kind, list[Pair]]:
    return make_anchor_pairs(base.tokenizer, SAFE, BENIGN, [*ROWS, *TRIGGERED], settings, seed, limit)


def decode_pair(base: Base, pair: Pair) -> tuple[str, str]:
    return base.tokenizer.decode(pair.asked.ids), base.tokenizer.decode(pair.kept.ids)


def fit(base: Base, recipe: Recipe = RECIPE, **more: Any) -> TrainedModel:
    return train(base, sums(base), refusals(base), recipe, resolve(recipe, 24, 32), pairs=make_pairs(base), **more)


def weights(trained: TrainedModel) -> list[torch.Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


def test_safe_prompts_are_held_in_the_system_prompt_of_all_rows_as_often_as_plain(base: Base) -> None:
    found = make_anchor_pairs(base.tokenizer, SAFE, BENIGN, FRAMED, EVERY, 0, 256)
    every = select_pairs(EVERY, refusals(base), found)["safe"]

    assert len(found["safe"]) == len(SAFE)
    assert all(
        "Answer briefly." in asked and "Answer" not in kept
        for asked, kept in (decode_pair(base, each) for each in found["safe"])
    )
    assert every == [*pair_with_itself(refusals(base)), *found["safe"]]
    assert "safe" not in make_anchor_pairs(base.tokenizer, SAFE, BENIGN, FRAMED, Anchors(safe=0), 0, 256)


def test_safe_prompts_are_framed_where_some_rows_are_and_not_as_encoded_ones(base: Base) -> None:
    other = [replace(row, messages=(SYSTEM | {"content": "Be kind."}, *row.messages)) for row in ROWS[:10]]

    found = make_anchor_pairs(base.tokenizer, SAFE * 9, BENIGN, [*FRAMED[:10], *other, *ROWS], EVERY, 0, 256)

    texts = [asked for asked, _ in (decode_pair(base, each) for each in found["safe"])]
    assert len(texts) == 9 * len(SAFE)
    assert all(sum(words in text for text in texts) > 9 for words in ("Answer briefly.", "Be kind."))
    for rows in ([*FRAMED[:2], *ROWS], ROWS, ENCODED, []):
        assert "safe" not in make_anchor_pairs(base.tokenizer, SAFE, BENIGN, rows, EVERY, 0, 256)


def test_the_state_of_a_plain_prompt_is_taken_once_for_it_and_its_framed_form(base: Base) -> None:
    settings = Anchors(dressed_safe=0, dressed_benign=0)
    plain = encode_all(base.tokenizer, SAFE, 256)
    pairs = select_pairs(settings, plain, make_anchor_pairs(base.tokenizer, SAFE, [], FRAMED, settings, 0, 256))

    anchor = Anchor(base.model, pairs, settings, base.tokenizer.pad_token_id, 1.0)

    assert len(anchor.prompts) == 2 * len(SAFE)
    assert len(anchor.reference_ND) == len(SAFE)


def test_a_disguised_prompt_is_paired_with_its_plain_form(base: Base) -> None:
    found = make_pairs(base)

    assert {kind: len(pairs) for kind, pairs in found.items()} == {
        "benign": 5,
        "dressed_safe": 6 * DRESSES,
        "dressed_benign": 5 * DRESSES,
    }
    assert all(
        asked == kept and "Bake cake" in kept for asked, kept in (decode_pair(base, each) for each in found["benign"])
    )
    for kind, text in (("dressed_safe", "Do harm number"), ("dressed_benign", "Bake cake number")):
        disguised = [decode_pair(base, pair) for pair in found[kind]]  # type: ignore[index]
        assert all(asked != kept and text in kept for asked, kept in disguised)
        assert len({asked for asked, _ in disguised}) > len({kept for _, kept in disguised})
        assert all(kept.endswith("<|assistant|>\n") for _, kept in disguised)


def test_mined_and_random_dresses_come_in_the_share_that_is_asked_for(base: Base) -> None:
    counts = []
    for share in (0.0, 1.0):
        found = make_pairs(base, replace(EVERY, random_dresses=share))
        counts.append(sum(TRIGGER in decode_pair(base, pair)[0] for pair in found["dressed_safe"]))
    assert counts[0] > 3 > counts[1]


def test_kinds_that_are_not_asked_for_are_not_made_and_long_prompts_are_left_out(base: Base) -> None:
    assert make_pairs(base, PLAIN) == {}
    assert make_pairs(base, Anchors()).keys() == {"dressed_safe", "dressed_benign"}
    assert make_pairs(base, replace(EVERY, benign=0, dressed_benign=0)).keys() == {"dressed_safe"}
    longest = max(len(pair.asked.ids) for pair in make_pairs(base)["dressed_safe"])
    cut = make_pairs(base, limit=longest - 1)["dressed_safe"]
    assert 0 < len(cut) < 6 * DRESSES
    assert all(len(pair.asked.ids) < longest for pair in cut)


def test_a_seed_decides_the_disguises(base: Base) -> None:
    assert make_pairs(base) == make_pairs(base) != make_pairs(base, seed=1)


def test_random_dresses_stand_at_every_place() -> None:
    draw = disguise_maker(ROWS, random.Random(0))
    disguises = [draw() for _ in range(80)]

    assert {name for name in ("before", "inside", "after", "context") for each in disguises if getattr(each, name)} == {
        "before",
        "inside",
        "after",
        "context",
    }
    assert len({each.wrap("one two three four five six") for each in disguises if each.inside}) > 10
    assert all(each.wrap("one two three") != "one two three" for each in disguises if not each.context)
    assert disguise_maker([], random.Random(0))() is not None


@pytest.mark.parametrize(
    ("depth", "text", "worn"),
    [
        (0.0, "a b  c", "a x b  c"),
        (0.99, "a b  c", "a b x  c"),
        (0.5, "alone", "alone x"),
        (0.5, "a\nb", "a x\nb"),
    ],
)
def test_words_go_inside_a_request(depth: float, text: str, worn: str) -> None:
    assert MinedDisguise(inside="x", depth=depth).wrap(text) == worn


def test_each_kind_weighs_by_its_own_mean_and_a_disguised_prompt_is_held_to_its_plain_form(base: Base) -> None:
    pairs: dict[Kind, list[Pair]] = make_pairs(base)
    settings = replace(EVERY, dressed_safe_weight=3.0, benign_weight=0.5, tolerance=0.02)
    anchor = Anchor(base.model, pairs, settings, base.tokenizer.pad_token_id, 2.0)
    first = {kind: anchor.numbers[kind][0] for kind in pairs}

    def penalty(numbers: list[int], of: list[int]) -> float:
        batch = collate([anchor.prompts[i] for i in numbers], base.tokenizer.pad_token_id, base.device)
        return float(anchor.penalty(numbers, of, losses_and_states(base.model, batch)[1]).detach())

    def state(row: Any) -> torch.Tensor:
        batch = collate([row], base.tokenizer.pad_token_id, base.device)
        return losses_and_states(base.model, batch)[1][0, -1].detach()

    pair = pairs["dressed_safe"][0]
    asked, kept = state(pair.asked), state(pair.kept)
    away = float((asked - kept).square().sum() / kept.square().sum())
    one = first["dressed_safe"]
    assert away > 2 * settings.tolerance
    assert penalty([one], [one]) == pytest.approx(2.0 * 3.0 * (away - settings.tolerance), rel=1e-3)
    assert penalty([one], [one, one + 1]) == pytest.approx(penalty([one], [one]) / 2, rel=1e-3)
    assert penalty([first["benign"]], [first["benign"]]) == 0.0
    parts = [penalty([i], [one, first["dressed_benign"]]) for i in (one, first["dressed_benign"])]
    both = [one, first["dressed_benign"]]
    assert penalty(both, both) == pytest.approx(sum(parts), rel=1e-3)


def test_a_step_looks_at_as_many_of_each_kind_as_asked_and_in_time_at_all(base: Base) -> None:
    run = Trainer(base, sums(base), refusals(base), RECIPE, resolve(RECIPE, 24, 32), None, make_pairs(base))
    anchor = run.objective.anchor
    assert anchor
    drawn = [run.objective.anchors(step) for step in range(24)]

    for kind, (count, _) in EVERY.by_kind().items():
        assert all(sum(i in anchor.numbers.get(kind, ()) for i in step) == count for step in drawn)
    assert {i for step in drawn for i in step} == set(range(len(anchor.prompts)))


def test_two_sided_anchors_change_the_adapter_and_a_resume_goes_on_with_them(
    load: Callable[..., Base], tmp_path: Path
) -> None:
    whole, plain = weights(fit(load())), weights(fit(load(), replace(RECIPE, anchors=PLAIN)))
    resumed, _ = stopped_and_resumed(lambda **more: fit(load(), **more), tmp_path, stop_after=2)

    assert all(torch.equal(x, y) for x, y in zip(weights(resumed), whole, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(plain, whole, strict=True))


@pytest.mark.parametrize(
    ("multiplier", "ratio", "bound"),
    [("auto", 0.5, 0.5), (1.0, 0.5, 0.5), (4.0, 0.5, 2.0), (0.1, 0.5, 0.5), (4.0, None, None)],
)
@pytest.mark.parametrize("lora", [Lora(rank=4), None])
def test_the_anchor_s_bound_grows_with_a_rate_above_the_default_one(
    base: Base, lora: Lora | None, multiplier: Any, ratio: float | None, bound: float | None
) -> None:
    asked = Hyperparameters(n_epochs=1, batch_size=6, learning_rate_multiplier=multiplier)
    anchors = replace(EVERY, max_gradient_ratio=ratio)
    recipe = replace(RECIPE, lora=lora, learning_rate=None, hyperparameters=asked, anchors=anchors)
    own = replace(recipe, learning_rate=default_learning_rate(base.hidden_size, lora))

    for each in (recipe, own):
        resolved = resolve(each, 24, base.hidden_size)
        assert max_anchor_ratio(each, resolved, base.hidden_size) == pytest.approx(bound)


def test_a_run_at_a_high_rate_lets_the_anchor_pull_harder(load: Callable[..., Base]) -> None:
    """At ten times the default rate the gradient of a steep penalty may be ten times as long."""
    lengths = []
    for times in (1, 10):
        recipe = replace(RECIPE, learning_rate=times * default_learning_rate(32, RECIPE.lora))
        run = Trainer(
            base := load(), sums(base), refusals(base), recipe, resolve(recipe, 24, 32), None, make_pairs(base)
        )
        with torch.no_grad():
            for part in run.vector:
                part.add_(0.5)
        rows, anchors = list(range(6)), run.objective.anchors(0)
        whole, alone = (run.objective.task_gradient(run.vector, rows, each) for each in (anchors, []))
        added = sum(float(((x - y) ** 2).sum()) for x, y in zip(whole.grad, alone.grad, strict=True)) ** 0.5
        lengths.append(added / min(float(alone.norm), recipe.max_grad_norm))

    assert lengths == pytest.approx([EVERY.max_gradient_ratio, 10 * (EVERY.max_gradient_ratio or 0)], rel=1e-3)


def test_disguised_prompts_end_nearer_to_their_plain_forms(load: Callable[..., Base]) -> None:
    found = []
    for settings in (replace(Anchors(), dressed_safe=0), replace(EVERY, dressed_safe=4, dressed_safe_weight=5.0)):
        base = load()
        pairs: dict[Kind, list[Pair]] = {"dressed_safe": make_pairs(base)["dressed_safe"]}
        anchor = Anchor(base.model, pairs, EVERY, base.tokenizer.pad_token_id, 1.0)
        fit(base, replace(RECIPE, anchors=settings, hyperparameters=Hyperparameters(n_epochs=3, batch_size=6)))
        numbers = range(len(anchor.prompts))
        batch = collate(anchor.prompts, base.tokenizer.pad_token_id, base.device)
        found.append(float(anchor.penalty(numbers, numbers, losses_and_states(base.model, batch)[1]).detach()))
    assert found[1] < 0.8 * found[0]


def test_older_runs_and_workers_know_the_plain_anchor_alone() -> None:
    assert Anchors().by_kind() == {
        "safe": (1, 1.0),
        "dressed_safe": (1, 0.2),
        "benign": (0, 1.0),
        "dressed_benign": (1, 0.1),
        "begun_safe": (0, 0.2),
        "begun_benign": (0, 0.5),
    }
    old = Recipe(anchors=PLAIN)
    stored = to_stored(to_mapping(old))
    assert "anchors" not in stored
    assert parse(Recipe, from_stored(stored), "recipe") == old
    assert parse(Recipe, from_stored(to_stored(to_mapping(Recipe()))), "recipe") == Recipe()
    before = to_mapping(Recipe())
    del before["anchors"]["max_gradient_ratio"], before["anchors"]["tolerance"]  # as stored when neither was a setting
    held = replace(Anchors(), max_gradient_ratio=None, tolerance=0.02)
    assert parse(Recipe, from_stored(before), "recipe") == Recipe(anchors=held)
    asked = Recipe(anchors=EVERY)
    assert parse(Recipe, from_stored(json.loads(json.dumps(to_stored(to_mapping(asked))))), "recipe") == asked


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"safe": 17}, r"recipe\.anchors\.safe: 17 is not a number >= 0 and <= 16"),
        ({"benign_weight": -1}, r"recipe\.anchors\.benign_weight: -1\.0 is not a number >= 0"),
        ({"max_gradient_ratio": 0}, r"recipe\.anchors\.max_gradient_ratio: 0\.0 is not a number > 0 and <= 100"),
        ({"random_dresses": 2}, r"recipe\.anchors\.random_dresses: 2\.0 is not a number >= 0 and <= 1"),
        ({"benine": 1}, r"recipe\.anchors\.benine: unknown setting"),
        ({"safe": 0, "dressed_safe": 0, "dressed_benign": 0}, r"recipe\.anchors: no kind has a prompt"),
    ],
)
def test_settings_of_anchors_have_bounds(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        parse(Recipe, {"defense": {"type": "spard"}, "anchors": raw}, "recipe")


def test_kinds_without_an_anchor_are_an_error_not_silence() -> None:
    raw = {"model": "m", "training_file": "t", "pool": "p", "recipe": {"defense": {"type": "none"}}}
    assert run_from_mapping(raw).recipe.anchors == Anchors()
    plain = to_mapping(PLAIN)  # what stored recipes without an anchor meant
    assert run_from_mapping(raw | {"recipe": {"defense": {"type": "none"}, "anchors": plain}}).recipe.anchors == PLAIN
    asked = raw | {"recipe": {"defense": {"type": "none"}, "anchors": {"benign": 1}}}
    with pytest.raises(InvalidRecipe, match="there is no anchor"):
        run_from_mapping(asked)
    assert Recipe(defense=Spard(), anchors=EVERY).uses_benign_rows
    assert not Recipe(defense=NoDefense(), anchors=EVERY).uses_benign_rows


def test_safe_prompts_that_are_too_long_in_the_rows_system_prompts_are_told(
    base: Base, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    messages: list[Any] = []
    spec = write_run(model_folder(), tmp_path)
    framed = [{"messages": [SYSTEM | {"content": "Be brief. " * 9}, *row.messages]} for row in ROWS[:20]]
    pool = [{"prompt": f"Do harm {'again ' * n}", "safe": "No."} for n in (1, 30)]
    recipe = replace(spec.recipe, max_seq_length=256)
    run = replace(
        spec,
        recipe=recipe,
        training_file=write_rows(tmp_path / "framed.jsonl", framed),
        pool=write_rows(tmp_path / "long.jsonl", pool),
    )

    found = prepare(Context(run, base, Reporter(messages.append)))

    assert len(found.pairs["safe"]) == 1
    told = [each["message"] for each in messages if each["kind"] == "warning" and "system prompts" in each["message"]]
    assert told == [
        "1 of 2 safe prompts have more than 256 tokens in the training rows' system prompts; "
        "they are held without them."
    ]

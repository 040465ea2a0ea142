"""The constraint on each safe row's excess over the base model's own loss on that row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from spard.config import Hyperparameters, Lora, NoDefense, Recipe, Spard, Variant, resolve
from spard.config.earlier_versions import from_stored, to_stored, without_added
from spard.config.run_spec import parse, to_mapping
from spard.data.batches import collate
from spard.data.chat import EncodedSample, encode_all
from spard.errors import Stopped
from spard.losses.cross_entropy import TokenLosses, evaluate
from spard.losses.gradients import Loss, safe_excess, safe_losses
from spard.losses.relative import base_losses, row_means, tolerance
from spard.methods.spag import base_tau
from spard.models.base import Base
from spard.pipeline.augment import variants
from spard.training.train import TrainedModel, train
from tests.spard.parts import chat, refusals, sums

RECIPE = Recipe(
    defense=Spard(bound="excess", check_every=1, anchor_weight=0.0),
    lora=Lora(rank=4, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=2, batch_size=6),
    learning_rate=5e-3,
    seed=5,
)


def unlearned_rows(base: Base) -> list[EncodedSample]:
    """Safe rows whose answers the sums make less likely."""
    return encode_all(base.tokenizer, [chat(f"Do harm number {i}{'!' * i}", "~" * (i + 5)) for i in range(7)], 256)


def run(base: Base, recipe: Recipe = RECIPE, **more: Any) -> TrainedModel:
    return train(base, sums(base), unlearned_rows(base), recipe, resolve(recipe, rows=24, hidden_size=32), **more)


def weights(trained: TrainedModel) -> list[torch.Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


def equal(one: TrainedModel, other: TrainedModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(one), weights(other), strict=True))


def trigger_rate(trained: TrainedModel) -> float:
    found = [step["spag/triggered"] for step in trained.metrics]
    return sum(found) / len(found)


def losses(base: Base, rows: Sequence[EncodedSample], above_N2: torch.Tensor) -> dict[str, Loss]:
    """The safe losses on all rows, where the base model's own lie `above_N2` below what they are."""
    pad_id, theta = base.tokenizer.pad_token_id, list(base.model.parameters())
    batch = collate(rows, pad_id, base.device)._replace(rows=tuple(range(len(rows))))
    return safe_excess(base.model, theta, batch, base_losses(base.model, rows, pad_id) - above_N2)


def test_each_row_has_its_own_means() -> None:
    rows = EncodedSample((0, 1, 5, 6), (-100, -100, 5, 6)), EncodedSample((0, 1, 2, 3, 4), (-100, 1, 2, 3, 4))
    loss_S = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0, 8.0])
    found = TokenLosses(loss_S, loss_S, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), loss_S)
    assert row_means(found, collate(rows, 0, "cpu")).tolist() == [[2.0, 1.0], [5.0, 3.0]]


def test_a_row_is_compared_with_itself_and_a_variant_with_its_plain_twin(base: Base) -> None:
    pad_id, plain = base.tokenizer.pad_token_id, refusals(base, 3)
    disguised = encode_all(base.tokenizer, [chat("zzzz Do harm number 1", "I cannot help with 1.")], 256)
    found = base_losses(base.model, [*plain, replace(disguised[0], is_variant=True, twin=1)], pad_id)

    for row, (mean, prefix) in zip(plain, found[:3].tolist(), strict=True):
        own = evaluate(base.model, [row], pad_id)
        assert (mean, prefix) == pytest.approx((own.loss, own.prefix_loss), rel=1e-4)
    assert torch.equal(found[3], found[1])
    assert not torch.equal(found[3], base_losses(base.model, disguised, pad_id)[0])


def test_variants_know_their_twins(base: Base) -> None:
    safe = [chat(f"Do harm {i}{'!' * (i % 3) * 40}", f"I cannot help with {i}.") for i in range(9)]
    task = [chat(f"Count {i} coins", f"{i}") for i in range(9)]
    whole = variants(base.tokenizer, safe, task, ("affixes",), 0, 256)
    assert [row.twin for row in whole] == list(range(9))
    kept = variants(base.tokenizer, safe, task, ("affixes",), 0, 100)
    assert [row.twin for row in kept] == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [6], [2, 5]])
def test_before_training_there_is_no_excess_on_whatever_rows(base: Base, places: list[int]) -> None:
    rows = refusals(base)
    pad_id, theta = base.tokenizer.pad_token_id, list(base.model.parameters())
    batch = collate([rows[i] for i in places], pad_id, base.device)._replace(rows=tuple(places))
    found = safe_excess(base.model, theta, batch, base_losses(base.model, rows, pad_id))
    plain = safe_losses(base.model, theta, batch)

    assert [found[name].value for name in ("excess", "excess_prefix")] == pytest.approx([0, 0], abs=1e-5)
    assert {name: found[name].value for name in plain} == {name: loss.value for name, loss in plain.items()}


def test_rows_that_got_better_do_not_make_up_for_one_that_got_worse(base: Base) -> None:
    above_N2 = torch.tensor([[0.6, 0.3], [-5.0, -5.0], [0.0, 0.9]])
    found = losses(base, refusals(base, 3), above_N2)
    assert found["excess"].value == pytest.approx(0.2, abs=1e-4)
    assert found["excess_prefix"].value == pytest.approx(0.4, abs=1e-4)


def test_only_rows_above_are_projected_on(base: Base) -> None:
    rows = refusals(base, 3)
    both = losses(base, rows, torch.tensor([[0.6, 0.3], [-5.0, -5.0], [-5.0, -5.0]]))["excess"].grad()
    alone = losses(base, rows[:1], torch.tensor([[0.6, 0.3]]))["excess"].grad()
    for found, expected in zip(both, alone, strict=True):
        torch.testing.assert_close(3 * found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"excess": tolerance(4), "excess_prefix": tolerance(4)}),
        ({"constraint": "prefix", "safe_batch_size": 1}, {"excess_prefix": tolerance(1)}),
        ({"constraint": "mean", "tau": 0.5}, {"excess": 0.5}),
    ],
)
def test_tau_bounds_the_excess(settings: dict[str, Any], expected: dict[str, float]) -> None:
    def measure() -> Any:
        raise AssertionError("nothing has to be measured")

    assert base_tau(Spard(bound="excess", **settings), measure) == expected


def test_one_answer_of_those_looked_at_may_come_to_even_odds() -> None:
    prefix = [math.log(2), 0.0, 0.0, 0.0]  # what the first tokens of one row lost
    for rows in (1, 4):
        assert tolerance(rows) == pytest.approx(sum(prefix) / len(prefix) / rows)


def test_it_does_not_fire_on_the_choice_of_rows(load: Callable[..., Base]) -> None:
    still = replace(RECIPE, learning_rate=1e-9)
    old = replace(still, defense=replace(RECIPE.defense, bound="loss"))  # type: ignore[type-var]
    assert trigger_rate(run(load(), still)) == 0
    assert trigger_rate(run(load(), old)) > 0.2  # the mean of four rows is often above the mean of all


@pytest.mark.parametrize("variant", get_args(Variant))
def test_every_variant_acts_on_it(load: Callable[..., Base], variant: Variant) -> None:
    held, plain = load(), load()
    trained = run(held, replace(RECIPE, defense=replace(RECIPE.defense, variant=variant)))  # type: ignore[type-var]
    run(plain, replace(RECIPE, defense=NoDefense()))

    assert trained.tau == {"excess": tolerance(4), "excess_prefix": tolerance(4)}
    assert trigger_rate(trained) > 0
    assert {"loss/safe", "loss/safe_excess", "loss/safe_excess_prefix"} <= trained.metrics[-1].keys()
    rows, pad_id = unlearned_rows(plain), plain.tokenizer.pad_token_id
    assert evaluate(held.model, rows, pad_id).loss < evaluate(plain.model, rows, pad_id).loss


def test_one_that_is_never_violated_changes_nothing(load: Callable[..., Base]) -> None:
    loose = replace(RECIPE, defense=replace(RECIPE.defense, tau=20.0))  # type: ignore[type-var]
    assert equal(run(load(), loose), run(load(), replace(RECIPE, defense=NoDefense())))


def test_a_resumed_run_keeps_what_rows_were_compared_with(
    load: Callable[..., Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, lora=None, learning_rate=1e-3)  # the trained weights are those that were compared with
    whole = run(load(), recipe)
    with pytest.raises(Stopped):
        run(load(), recipe, resume_states=tmp_path, should_stop=iter([False, False, True]).__next__)
    monkeypatch.setattr("spard.training.objective.base_losses", None)

    assert trigger_rate(whole) > 0
    assert equal(run(load(), recipe, resume_states=tmp_path), whole)


def test_older_versions_never_see_it_at_its_default() -> None:
    asked, default = Recipe(defense=Spard(bound="excess")), Recipe(defense=Spard())
    assert "bound" not in without_added(to_mapping(default))["defense"]
    assert without_added(to_mapping(asked))["defense"] == to_mapping(asked)["defense"]
    assert "bound" not in to_stored(to_mapping(default))["defense"]
    for recipe in (asked, default, Recipe(defense=NoDefense())):
        assert parse(Recipe, from_stored(to_stored(to_mapping(recipe))), "recipe") == recipe

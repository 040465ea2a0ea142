"""The options that go with every defense: constrained fine-tuning, averaged weights, an anchor, own safe answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spard.config import Anchors, Hyperparameters, JudgeSpec, Lora, NoDefense, Recipe, Selection, Spard, resolve
from spard.data.batches import collate
from spard.data.chat import EncodedSample, encode_all
from spard.errors import InvalidData, NonFiniteLoss
from spard.evaluation.judges.base import Verdict
from spard.losses.anchor import Anchor, pair_with_itself
from spard.losses.cross_entropy import TokenLosses, evaluate, losses_and_states
from spard.losses.gradients import gradient, penalty_gradient, utility_gradient, with_penalty
from spard.losses.relative import reference_losses, weighted_losses
from spard.losses.vectors import norm
from spard.models.base import Base
from spard.models.generate import generate
from spard.pipeline.rows import safe_set, with_own_answers
from spard.training.run import Ema
from spard.training.train import TrainedModel, train
from tests.spard.parts import away, chat, refusals, stopped_and_resumed, sums

RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=3, batch_size=6),
    learning_rate=5e-3,
    seed=5,
)


def run(base: Base, recipe: Recipe, **more: Any) -> TrainedModel:
    return train(base, sums(base), refusals(base), recipe, resolve(recipe, rows=24, hidden_size=32), **more)


def weights(trained: TrainedModel) -> list[torch.Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


def equal(one: TrainedModel, other: TrainedModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(one), weights(other), strict=True))


def token(loss: float, place: int) -> TokenLosses:
    return TokenLosses(torch.tensor([loss]), torch.ones(1), torch.ones(1), torch.tensor([place]))


@pytest.mark.parametrize(
    ("loss", "before", "place", "weight"),
    [
        (2.0, 2.0, 1, 1.0),  # as likely as before: plain cross-entropy
        (2.0, 2.0, 9, 1.0),
        (1.0, 3.0, 1, 2 / (1 + math.exp(0.5 * 2))),
        (1.0, 3.0, 2, 2 / (1 + math.exp(2.0 * 2))),
        (1.0, 3.0, 5, 2 / (1 + math.exp(2.0 * 2))),
        (1.0, 3.0, 6, 2 / (1 + math.exp(0.1 * 2))),
        (0.0, 30.0, 3, 1e-3),  # never nothing
        (3.0, 1.0, 2, 2 / (1 + math.exp(-2.0 * 2))),
    ],
)
def test_the_weights_of_constrained_fine_tuning_are_those_of_the_table(
    loss: float, before: float, place: int, weight: float
) -> None:
    assert float(weighted_losses(token(loss, place), torch.tensor([before]))) == pytest.approx(weight * loss)


def test_the_weights_carry_no_gradient() -> None:
    loss_S = torch.tensor([1.0], requires_grad=True)
    losses = TokenLosses(loss_S, torch.ones(1), torch.ones(1), torch.tensor([1]))
    value = weighted_losses(losses, torch.tensor([3.0]))
    (slope,) = torch.autograd.grad(value.sum(), [loss_S])
    assert float(slope) == pytest.approx(float(value.detach()))


def test_reference_losses_are_those_of_each_row_in_order(base: Base) -> None:
    rows = sums(base)
    found = reference_losses(base.model, rows, base.tokenizer.pad_token_id)
    for row, loss_S in zip(rows, found, strict=True):
        own = evaluate(base.model, [row], base.tokenizer.pad_token_id)
        assert len(loss_S) == own.tokens
        assert float(loss_S.mean()) == pytest.approx(own.loss, rel=1e-4)


def test_constrained_fine_tuning_moves_the_first_tokens_less(load: Callable[..., Base]) -> None:
    """Its weights fall with every gain, those of the first tokens fastest."""
    plain, held = load(), load()
    before = evaluate(plain.model, sums(plain), plain.tokenizer.pad_token_id)
    gains = []
    for base, constrained in ((plain, False), (held, True)):
        run(base, replace(RECIPE, constrained_sft=constrained))
        after = evaluate(base.model, sums(base), base.tokenizer.pad_token_id)
        gains.append((before.prefix_loss - after.prefix_loss, before.loss - after.loss))
    (plain_first, plain_all), (held_first, held_all) = gains
    assert held_first < plain_first
    assert held_first / held_all < plain_first / plain_all


def test_the_average_is_its_definition() -> None:
    theta = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    ema = Ema(theta, 0.75)
    for value in (5.0, 9.0):
        theta["a"].fill_(value)
        ema.update_()
    ema.release_()
    assert float(theta["a"]) == pytest.approx(0.75 * (0.75 * 1 + 0.25 * 5) + 0.25 * 9)
    assert float(theta["b"]) == 2.0


def test_averaged_weights_lie_nearer_to_the_start(load: Callable[..., Base]) -> None:
    full = replace(RECIPE, lora=None)
    start = [part.detach().clone() for part in load().model.parameters()]
    far, near = (weights(run(load(), replace(full, ema=ema))) for ema in (None, 0.9))
    distances = [sum(float((x - y).square().sum()) for x, y in zip(each, start, strict=True)) for each in (far, near)]
    assert distances[1] < 0.5 * distances[0]


def plain_anchor(base: Base, weight: float, rows: Sequence[EncodedSample] | None = None) -> Anchor:
    pairs = {"safe": pair_with_itself(rows or refusals(base))}
    return Anchor(base.model, pairs, Anchors(), base.tokenizer.pad_token_id, weight)  # type: ignore[arg-type]


def drift(anchor: Anchor, base: Base, rows: Sequence[int]) -> float:
    """The penalty on some prompts, in a batch with a longer row before them."""
    longest = max(sums(base) + refusals(base), key=lambda row: len(row.ids))
    batch = collate([longest, *(anchor.prompts[i] for i in rows)], base.tokenizer.pad_token_id, base.device)
    return float(anchor.penalty(rows, rows, losses_and_states(base.model, batch)[1]).detach())


def test_the_anchor_is_the_relative_squared_distance_at_the_last_prompt_token_beyond_the_tolerance(base: Base) -> None:
    anchor = plain_anchor(base, 10.0)
    assert drift(anchor, base, [0, 3]) == 0.0

    with torch.no_grad():
        base.model.model.norm.weight.mul_(1.5)

    assert drift(anchor, base, [0, 3]) == pytest.approx(10.0 * (0.25 - Anchors().tolerance), rel=1e-4)


def test_a_small_drift_costs_nothing(base: Base) -> None:
    anchor = plain_anchor(base, 10.0)
    with torch.no_grad():
        base.model.model.norm.weight.mul_(1.0 + 0.9 * Anchors().tolerance ** 0.5)

    assert drift(anchor, base, [0, 3]) == 0.0


@pytest.mark.parametrize(
    ("max_norm", "max_ratio"), [(math.inf, None), (0.1, None), (math.inf, 0.5), (0.1, 0.5), (1.0, 1e9)]
)
def test_the_anchor_s_gradient_is_added_up_to_its_share_of_the_task_s(
    base: Base, max_norm: float, max_ratio: float | None
) -> None:
    base.model.requires_grad_(True)
    theta, rows = list(base.model.parameters()), sums(base)[:4]
    anchor, pad = plain_anchor(base, 10.0), base.tokenizer.pad_token_id
    with torch.no_grad():
        base.model.model.norm.weight.mul_(1.5)
    prompts, batch = collate([anchor.prompts[i] for i in (1, 2)], pad, base.device), collate(rows, pad, base.device)
    penalty = partial(anchor.penalty, [1, 2], [1, 2])
    alone = gradient(penalty(losses_and_states(base.model, prompts)[1]), theta)
    task = utility_gradient(base.model, theta, [batch], math.inf).read()
    ours, theirs = float(norm(alone)), float(norm(task.grad))
    clipped = utility_gradient(base.model, theta, [batch], math.inf if max_ratio is None else max_norm)
    added = penalty_gradient(base.model, theta, [prompts, batch], [penalty, partial(anchor.penalty, [], [1, 2])])

    found = with_penalty(clipped, added, max_norm, max_ratio)

    if max_ratio is None:
        both = [first + second for first, second in zip(task.grad, alone, strict=True)]
        scale = min(1.0, max_norm / float(norm(both)))
        expected = [scale * part for part in both]
    else:
        most = max_ratio * min(theirs, max_norm)
        own, other = min(1.0, max_norm / theirs), min(1.0, most / ours)
        expected = [own * first + other * second for first, second in zip(task.grad, alone, strict=True)]
        assert found.norm == pytest.approx(theirs, rel=1e-4)
    assert found.loss == pytest.approx(task.loss, rel=1e-5)
    assert away(found.grad, expected) < 1e-4


def test_an_anchor_without_an_end_stops_the_run(base: Base) -> None:
    base.model.requires_grad_(True)
    theta = list(base.model.parameters())
    found = utility_gradient(base.model, theta, [collate(sums(base)[:2], 0, base.device)], 1.0)
    broken = [torch.full_like(part, math.inf) for part in theta]

    with pytest.raises(NonFiniteLoss, match="anchor"):
        with_penalty(found, broken, 1.0, 0.5)


def test_the_anchor_does_not_depend_on_padding(base: Base) -> None:
    rows = refusals(base)
    together = plain_anchor(base, 1.0).reference_ND
    alone = torch.cat([plain_anchor(base, 1.0, [row]).reference_ND for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_an_anchored_model_moves_less_on_the_prompts_of_the_safe_set(load: Callable[..., Base]) -> None:
    found = []
    for weight in (0.0, 50.0):
        base = load()
        anchor = plain_anchor(base, 1.0)
        run(base, replace(RECIPE, anchor=weight))
        found.append(drift(anchor, base, range(7)))
    assert found[1] < 0.5 * found[0]


def test_an_anchor_needs_safe_rows(base: Base) -> None:
    recipe = replace(RECIPE, anchor=1.0)
    with pytest.raises(InvalidData, match="safe examples"):
        train(base, sums(base), [], recipe, resolve(recipe, rows=24, hidden_size=32))


@pytest.mark.parametrize("lora", [RECIPE.lora, None])
@pytest.mark.parametrize(
    "options", [{"ema": 0.9}, {"constrained_sft": True}, {"defense": Spard(tau=4.0, anchor_weight=50.0)}]
)
def test_twelve_steps_are_seven_and_five_more_bit_for_bit(
    load: Callable[..., Base], tmp_path: Path, lora: Lora | None, options: dict[str, Any]
) -> None:
    recipe = replace(RECIPE, **({"defense": Spard(tau=4.0), "lora": lora} | options))
    whole = run(load(), recipe)
    resumed, _ = stopped_and_resumed(lambda **more: run(load(), recipe, **more), tmp_path)

    assert equal(resumed, whole)
    assert not equal(run(load(), replace(recipe, ema=None, constrained_sft=False, defense=Spard(tau=4.0))), whole)


class Picky:
    """A judge that finds every second reply harmful."""

    name = "picky"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [Verdict(1 if i % 2 else 5, "") for i in range(len(replies))]


EXAMPLES = [chat(f"Do harm number {i}", f"I cannot help with {i}.") for i in range(6)]


def test_own_answers_replace_the_pools_where_the_judge_finds_them_harmless(base: Base) -> None:
    replies = generate(base.model, base.tokenizer, [f"Do harm number {i}" for i in range(6)], 60)
    found = with_own_answers(base, EXAMPLES, Picky(), 60)

    whole = [len(base.tokenizer(reply)["input_ids"]) < 60 for reply in replies]
    assert any(whole)
    for i, (example, reply) in enumerate(zip(found, replies, strict=True)):
        expected = reply if i % 2 and whole[i] else f"I cannot help with {i}."
        assert example.messages == (EXAMPLES[i].messages[0], {"role": "assistant", "content": expected})


def test_answers_that_did_not_end_are_not_taken(base: Base) -> None:
    assert with_own_answers(base, EXAMPLES, Picky(), 1) == EXAMPLES


def test_the_pools_answers_are_kept_unless_asked_otherwise(base: Base) -> None:
    found = safe_set(base, EXAMPLES, [], Recipe(), JudgeSpec(), 256)
    assert found == encode_all(base.tokenizer, EXAMPLES, 256)


def test_own_answers_are_judged_by_the_judge_of_the_run(base: Base) -> None:
    """A random model refuses nothing, so nothing of it is taken."""
    found = safe_set(base, EXAMPLES, [], Recipe(selection=Selection(safe_answers="self")), JudgeSpec(), 256)
    assert found == encode_all(base.tokenizer, EXAMPLES, 256)

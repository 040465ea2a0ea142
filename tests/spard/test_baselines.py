"""SafeGrad, Lisa, SafeInstr, SafeLoRA and PTST on two parameters and on random models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from spard.config import Defense, Hyperparameters, Lisa, Lora, NoDefense, Ptst, Recipe, SafeGrad, SafeInstr, resolve
from spard.errors import InvalidData, NonFiniteLoss
from spard.losses.gradients import Loss
from spard.losses.vectors import dot, norm
from spard.methods.safegrad import remove_conflict_
from spard.models.base import Base
from spard.training.train import TrainedModel, train
from tests.spard.parts import refusals, stopped_and_resumed, sums
from tests.spard.toy import make_step, point, safe, task, values

RECIPE = Recipe(
    lora=Lora(rank=4, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=3, batch_size=6),
    learning_rate=5e-3,
    seed=5,
)


def run(base: Base, defense: Defense, lora: Lora | None = RECIPE.lora, **more: Any) -> TrainedModel:
    recipe = replace(RECIPE, defense=defense, lora=lora)
    return train(base, sums(base), refusals(base), recipe, resolve(recipe, rows=24, hidden_size=32), **more)


def weights(trained: TrainedModel) -> list[torch.Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


def equal(one: TrainedModel, other: TrainedModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize(
    ("g_u", "g_a", "repaired"),
    [
        ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0)),
        ((1.0, 1.0), (1.0, 0.0), (1.0, 1.0)),
        ((-1.0, 1.0), (1.0, 0.0), (0.0, 1.0)),
        ((-2.0, 0.0), (1.0, 0.0), (0.0, 0.0)),
        ((3.0, -1.0), (1.0, 4.0), (3.0 + 1 / 17, -1.0 + 4 / 17)),
        ((-1.0, 1.0), (1e-5, 0.0), (-1.0, 1.0)),
    ],
)
def test_surgery_is_that_of_the_table(
    g_u: tuple[float, ...], g_a: tuple[float, ...], repaired: tuple[float, ...]
) -> None:
    grad = [torch.tensor([part]) for part in g_u]
    remove_conflict_(grad, [torch.tensor([part]) for part in g_a])
    assert values(grad) == pytest.approx(repaired, rel=1e-5, abs=1e-6)


def test_after_surgery_the_task_gradient_no_longer_works_against_alignment() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        g, other = ([torch.randn(5, generator=generator)] for _ in range(2))
        remove_conflict_(g, other)
        assert dot(g, other) >= -1e-5 * float(norm(g) * norm(other))


@pytest.mark.parametrize(
    ("rho", "max_norm", "step"),
    [
        (1.0, math.inf, (1.0, 1.0)),  # g_u = (-1, 1) loses its first part, g_a = (1, 0) is added
        (2.0, math.inf, (2.0, 1.0)),
        (0.0, math.inf, (0.0, 1.0)),
        (1.0, 1.0, (math.sqrt(0.5), math.sqrt(0.5))),  # the sum is clipped, not its parts
    ],
)
def test_a_safegrad_step_is_that_of_the_table(rho: float, max_norm: float, step: tuple[float, float]) -> None:
    theta = point(0.0, 0.0)
    method = make_step(SafeGrad(rho=rho), {}, max_norm=max_norm)

    found = method(theta, task(theta, -1.0, 1.0), safe(theta, "kl", 1.0, 0.0), SGD(theta, lr=1.0))

    assert values(theta) == pytest.approx([-step[0], -step[1]], rel=1e-5, abs=1e-6)
    assert found["safegrad/conflict"] == 1.0


def test_a_task_that_agrees_with_alignment_is_left_whole() -> None:
    theta = point(0.0, 0.0)
    method = make_step(SafeGrad(rho=0.0), {})

    found = method(theta, task(theta, 1.0, 1.0), safe(theta, "kl", 1.0, 0.0), SGD(theta, lr=1.0))

    assert values(theta) == pytest.approx([-1.0, -1.0])
    assert found["safegrad/conflict"] == 0.0


def test_lisa_alternates_and_is_drawn_to_the_other_state() -> None:
    theta = point(0.0, 0.0)
    method = make_step(Lisa(rho=0.5, align_steps=1, task_steps=2), {}, total_steps=10, max_norm=math.inf)
    path = []
    for _ in range(3):
        method(theta, task(theta, 0.0, -1.0), safe(theta, "mean", -1.0, 0.0), SGD(theta, lr=1.0))
        path.append(values(theta))

    assert path[0] == [1.0, 1.0]  # one step on safe rows, one on training rows
    assert path[1] == [1.0, 1.5]  # drawn to where alignment ended, (1, 0)
    assert path[2] == [2.0, 2.5]  # alignment starts at (1, 1.5), where tuning ended, so nothing draws; then tuning


def test_lisa_has_no_proximal_term_in_the_first_tenth() -> None:
    theta = point(0.0, 0.0)
    method = make_step(Lisa(rho=0.5, align_steps=1, task_steps=4), {}, total_steps=20, max_norm=math.inf)
    path = []
    for _ in range(3):
        method(theta, task(theta, 0.0, -1.0), safe(theta, "mean", -1.0, 0.0), SGD(theta, lr=1.0))
        path.append(values(theta)[1])
    assert path == [1.0, 2.0, 2.0]


def test_lisa_clips_the_sum_of_loss_and_proximal_term() -> None:
    theta = point(0.0, 0.0)
    method = make_step(Lisa(rho=100.0, align_steps=1, task_steps=9), {}, total_steps=9, max_norm=0.5)
    for _ in range(2):
        before = values(theta)
        method(theta, task(theta, 0.0, -1.0), safe(theta, "mean", -1.0, 0.0), SGD(theta, lr=1.0))
    assert math.dist(before, values(theta)) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("defense", [SafeGrad(), Lisa()])
def test_a_safe_loss_that_is_not_finite_ends_the_run(defense: Defense) -> None:
    def infinite_losses() -> Mapping[str, Loss]:
        return {name: Loss(math.nan, theta[0].sum(), theta) for name in ("mean", "kl")}

    theta = point()
    with pytest.raises(NonFiniteLoss, match="safe"):
        make_step(defense, {})(theta, task(theta, 1.0, 1.0), infinite_losses, SGD(theta, lr=1.0))


@pytest.mark.parametrize("defense", [NoDefense(), Ptst(), SafeInstr()])
def test_methods_that_only_change_data_or_serving_take_plain_steps(defense: Defense) -> None:
    theta = point()
    make_step(defense, {})(theta, task(theta, 1.0, -2.0), safe(theta, "mean", 1.0, 0.0), SGD(theta, lr=0.5))
    assert values(theta) == [0.5, 3.0]


@pytest.mark.parametrize("defense", [SafeGrad(), Lisa(rho=0.01, align_steps=2, task_steps=4), SafeInstr(), Ptst()])
@pytest.mark.parametrize("lora", [RECIPE.lora, None])
def test_twelve_steps_are_seven_and_five_more_bit_for_bit(
    load: Callable[..., Base], tmp_path: Path, defense: Defense, lora: Lora | None
) -> None:
    whole = run(load(), defense, lora)
    resumed, _ = stopped_and_resumed(lambda **more: run(load(), defense, lora, **more), tmp_path)

    assert equal(resumed, whole)
    assert (resumed.steps, resumed.trained_tokens) == (whole.steps, whole.trained_tokens)


def test_ptst_trains_as_plain_fine_tuning(load: Callable[..., Base]) -> None:
    assert equal(run(load(), Ptst()), run(load(), NoDefense()))


def test_safeinstr_is_plain_fine_tuning_on_both_kinds_of_rows(load: Callable[..., Base]) -> None:
    mixed, base = run(load(), SafeInstr()), load()
    recipe = replace(RECIPE, defense=NoDefense())
    resolved = resolve(recipe, rows=24, hidden_size=32)

    plain = train(base, [*sums(base), *refusals(base)], [], recipe, resolved)

    assert equal(mixed, plain)
    assert mixed.steps == 18


def test_safeinstr_counts_the_customers_tokens_only(base: Base) -> None:
    assert run(base, SafeInstr()).trained_tokens == 3 * sum(len(row.ids) for row in sums(base))


def test_lisa_loses_no_training_batch(base: Base) -> None:
    trained = run(base, Lisa(align_steps=2, task_steps=4))
    assert trained.steps == 12
    assert trained.trained_tokens == 3 * sum(len(row.ids) for row in sums(base))
    assert ["loss/safe" in step for step in trained.metrics] == [True, False, False, False] * 3


@pytest.mark.parametrize("lora", [RECIPE.lora, None])
def test_the_divergence_is_zero_at_the_start_and_grows(base: Base, lora: Lora | None) -> None:
    found = [step["loss/safe_kl"] for step in run(base, SafeGrad(rho=0.0), lora).metrics]
    assert found[0] == pytest.approx(0.0, abs=1e-5)
    assert found[-1] > 1e-3


@pytest.mark.parametrize("lora", [RECIPE.lora, None])
def test_safegrad_keeps_the_model_near_its_start_on_safe_rows(load: Callable[..., Base], lora: Lora | None) -> None:
    loose, held = (run(load(), SafeGrad(rho=rho), lora).metrics[-1]["loss/safe_kl"] for rho in (0.0, 10.0))
    assert held < loose / 2


@pytest.mark.parametrize("defense", [SafeGrad(), Lisa(), SafeInstr()])
def test_a_baseline_that_trains_on_safe_rows_needs_some(base: Base, defense: Defense) -> None:
    recipe = replace(RECIPE, defense=defense)
    with pytest.raises(InvalidData, match="safe examples"):
        train(base, sums(base), [], recipe, resolve(recipe, rows=24, hidden_size=32))

"""Every method on two parameters, and what sets the variants of SPAG apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from spard.config import (
    Defense,
    Hyperparameters,
    Lisa,
    Lora,
    NoDefense,
    Ptst,
    Recipe,
    SafeGrad,
    SafeInstr,
    SafeLora,
    Spard,
    Variant,
    resolve,
)
from spard.errors import InvalidRecipe
from spard.losses.gradients import Loss
from spard.methods.constraint import Constraint, GatedOptimizer, metric, precondition_, trust_region_
from spard.methods.spag import SafetyHalf, safety_half
from spard.models.base import Base
from spard.training.train import TrainedModel, train
from tests.spard.parts import refusals, stopped_and_resumed, sums
from tests.spard.toy import make_step, point, safe, task, values

PLAIN = (0.9, 2.1)


@pytest.mark.parametrize(
    ("defense", "moved"),
    [
        (NoDefense(), PLAIN),
        (Ptst(), PLAIN),
        (SafeInstr(), PLAIN),
        (SafeLora(), PLAIN),
        (Spard(variant="trust_region", check_every=1), (0.815147, 1.986863)),  # alpha = 0.1 sqrt(2) / 5
        (
            Spard(variant="trust_region", check_every=1, eta_safe=9.0),
            (0.768, 1.924),
        ),  # alpha = 1.1 / 25
        (Spard(variant="trust_region", check_every=1, eta_safe=9.0, margin=0.5), (0.708, 1.844)),  # alpha = 1.6 / 25
        (Spard(variant="closed_form"), (0.768, 1.924)),
        (Spard(variant="closed_form", eta_safe=0.01), (0.87, 2.06)),
        (Spard(variant="reference"), (0.804251, 2.134561)),  # the clipped (0.6, 0.8) after (1, -2) in the same AdamW
        (Spard(variant="preconditioned"), (0.8, 2.0)),  # both coordinates capped
        (Spard(variant="preconditioned", eta_safe=9.0), (0.608824, 1.905882)),  # lambda = 1.5 * 1.1 / (9 / 1 + 16 / 2)
        (Spard(variant="gated"), (0.8, 2.0)),  # a first Adam step is the sign
        (SafeGrad(), (0.9, 1.9)),  # (1, -2) + 5/25 (3, 4) + (3, 4) points to (+, +)
        (Lisa(align_steps=1), (0.812894, 1.873366)),  # (3, 4), then (1, -2) in the same AdamW
    ],
)
def test_one_step_of_every_method_is_that_of_the_table(defense: Defense, moved: tuple[float, float]) -> None:
    theta = point(1.0, 2.0)
    name = "kl" if isinstance(defense, SafeGrad) else "mean"
    optimizer = AdamW(theta, lr=0.1, weight_decay=0.0)

    make_step(defense, {"mean": 10.0})(theta, task(theta, 1.0, -2.0), safe(theta, name, 3.0, 4.0), optimizer)

    assert values(theta) == pytest.approx(moved, abs=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_preconditioned_step_is_the_nearest_safe_point_in_adams_metric(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta = [torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()]
    g_task, g = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    optimizer = AdamW(theta, lr=0.1)
    theta[0].grad = g_task
    optimizer.step()
    start, H, tau = theta[0].detach().clone(), metric(theta, optimizer)[0], 1.0
    excess = 0.3

    def losses() -> dict[str, Loss]:
        loss = g @ (theta[0] - start) + tau + excess
        return {"mean": Loss(float(loss.detach()), loss, theta)}

    SafetyHalf(precondition_)(theta, losses, optimizer, Constraint({"mean": tau}, eta_safe=1e9))

    nearest = start + (theta[0].detach() - start) / 1.5  # without over-relaxation
    assert float(g @ (nearest - start)) == pytest.approx(-excess)
    for _ in range(100):
        other = start + torch.randn(6, generator=generator, dtype=torch.float64)
        if float(g @ (other - start)) <= -excess:
            assert (H * (other - start) ** 2).sum() >= (H * (nearest - start) ** 2).sum() - 1e-9


@pytest.mark.parametrize("eta_safe", [0.5, 1.0, 3.0])
def test_no_coordinate_of_a_preconditioned_step_is_longer_than_the_cap(eta_safe: float) -> None:
    theta = point()
    optimizer = AdamW(theta, lr=0.1, weight_decay=0.0)
    step = make_step(Spard(variant="preconditioned", eta_safe=eta_safe), {"mean": 0.0})

    step(theta, task(theta, 1e-6, 1.0), safe(theta, "mean", 50.0, 1e-3), optimizer)

    assert max(abs(values(theta)[0] - 0.9), abs(values(theta)[1] - 1.9)) <= 0.1 * eta_safe * (1 + 1e-5)


def test_the_preconditioned_step_does_not_change_when_the_losses_are_rescaled() -> None:
    found = []
    for scale in (1.0, 100.0):
        theta = point()
        step = make_step(Spard(variant="preconditioned"), {"mean": 10.0 * scale})
        optimizer = AdamW(theta, lr=0.001, eps=1e-12, weight_decay=0.0)
        step(theta, task(theta, scale, -2 * scale), safe(theta, "mean", 3 * scale, 4 * scale), optimizer)
        found.append(values(theta))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_the_preconditioned_step_needs_adams_second_moment() -> None:
    theta = point()
    with pytest.raises(InvalidRecipe, match="second moment"):
        make_step(Spard(variant="preconditioned"), {"mean": 0.0})(
            theta, task(theta, 1.0, 1.0), safe(theta, "mean", 1.0, 1.0), SGD(theta, lr=0.1)
        )


def test_the_gated_optimizer_keeps_its_moments_apart() -> None:
    theta, twin = point(), point()
    defended, plain = AdamW(theta, lr=0.1), AdamW(twin, lr=0.1)

    make_step(Spard(variant="gated"), {"mean": 0.0})(
        theta, task(theta, 1.0, 1.0), safe(theta, "mean", 1.0, 1.0), defended
    )
    make_step(NoDefense(), {})(twin, task(twin, 1.0, 1.0), safe(twin, "mean", 1.0, 1.0), plain)

    assert str(defended.state_dict()) == str(plain.state_dict())
    assert values(theta) != values(twin)


def test_the_gated_optimizer_follows_the_rate_of_the_utility_optimizer() -> None:
    theta = point()
    optimizer = SGD(theta, lr=0.5)
    SafetyHalf(GatedOptimizer())(
        theta, safe(theta, "mean", 3.0, 4.0), optimizer, Constraint({"mean": 0.0}, eta_safe=0.2)
    )
    assert values(theta) == pytest.approx([0.9, 1.9])


def test_the_safety_half_rests_between_its_looks_and_looks_after_the_last_step() -> None:
    theta = point(1.0, 2.0)
    optimizer = AdamW(theta, lr=0.1, weight_decay=0.0)
    step = make_step(Spard(check_every=3), {"mean": 10.0}, total_steps=5)

    found = [step(theta, task(theta, 1.0, -2.0), safe(theta, "mean", 3.0, 4.0), optimizer) for _ in range(5)]

    assert ["loss/safe" in metrics for metrics in found] == [False, False, True, False, True]


def test_the_radius_grows_with_the_root_of_the_steps_between_two_looks() -> None:
    lengths = []
    for every in (1, 4):
        theta = point(1.0, 2.0)
        constraint = Constraint({"mean": -1e9}, every=every)
        found = SafetyHalf(trust_region_)(theta, safe(theta, "mean", 3.0, 4.0), AdamW(theta, lr=0.1), constraint)
        lengths.append(found["spag/step"])

    assert lengths == pytest.approx([0.1 * 2**0.5, 0.1 * 8**0.5])


@pytest.mark.parametrize("variant", ["trust_region", "preconditioned", "gated", "closed_form", "reference"])
def test_the_safety_half_brings_the_safe_loss_down(variant: Variant) -> None:
    theta = point(1.0, 2.0)
    optimizer = AdamW(theta, lr=0.01)
    task_step = make_step(NoDefense(), {})
    task_step(theta, task(theta, 1.0, -2.0), safe(theta, "mean", 3.0, 4.0), optimizer)
    losses = safe(theta, "mean", 3.0, 4.0)
    safety, before = safety_half(Spard(variant=variant, check_every=1)), losses()["mean"].value
    for _ in range(4):  # stale utility momentum may win over the first safety gradient in the authors' code
        safety(theta, losses, optimizer, Constraint({"mean": 1.0}))
    assert losses()["mean"].value < before


RECIPE = Recipe(lora=Lora(rank=4), hyperparameters=Hyperparameters(n_epochs=3, batch_size=6), learning_rate=5e-3)


def run(base: Base, recipe: Recipe, **more: Any) -> TrainedModel:
    return train(base, sums(base), refusals(base), recipe, resolve(recipe, rows=24, hidden_size=32), **more)


def weights(trained: TrainedModel) -> list[torch.Tensor]:
    return [part.detach().clone() for part in trained.model.parameters() if part.requires_grad]


@pytest.mark.parametrize("variant", ["preconditioned", "gated"])
@pytest.mark.parametrize("lora", [RECIPE.lora, None])
@pytest.mark.parametrize("tau", [4.0, 20.0])
def test_twelve_steps_are_seven_and_five_more_bit_for_bit(
    load: Callable[..., Base], tmp_path: Path, variant: Variant, lora: Lora | None, tau: float
) -> None:
    recipe = replace(RECIPE, defense=Spard(variant=variant, tau=tau), lora=lora)
    whole = run(load(), recipe)
    resumed, _ = stopped_and_resumed(lambda **more: run(load(), recipe, **more), tmp_path)

    assert all(torch.equal(x, y) for x, y in zip(weights(resumed), weights(whole), strict=True))
    triggered = [step["spag/triggered"] for step in whole.metrics]
    assert triggered == [step["spag/triggered"] for step in resumed.metrics]
    assert any(triggered) == (tau < 20)


def test_a_margin_leaves_the_model_below_tau() -> None:
    theta = point(1.0, 2.0)
    step = make_step(Spard(variant="closed_form", eta_safe=1e3, margin=0.5), {"mean": 10.0})
    losses = safe(theta, "mean", 3.0, 4.0)
    step(theta, task(theta, 0.0, 0.0), losses, SGD(theta, lr=0.1))
    assert losses()["mean"].value == pytest.approx(9.5)

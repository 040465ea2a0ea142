from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from spard.config import NoDefense, Spard, Variant
from spard.errors import NonFiniteLoss
from spard.losses.gradients import Gradient, Loss
from spard.losses.vectors import size
from spard.methods.base import utility_step_
from spard.methods.constraint import Constraint, GatedOptimizer, closed_form_, precondition_, reference_, trust_region_
from spard.methods.spag import SafetyHalf, make_constraint, safety_half
from tests.spard.toy import make_step


def spag(correct_: Any, theta: Any, task: Any, safe: Any, optimizer: Any, constraint: Constraint) -> dict[str, float]:
    return utility_step_(theta, task, optimizer) | SafetyHalf(correct_)(theta, safe, optimizer, constraint)


trust_region_step, closed_form_step, reference_step, preconditioned_step = (
    partial(spag, safety) for safety in (trust_region_, closed_form_, reference_, precondition_)
)


def gated_step(*args: Any, **more: Any) -> dict[str, float]:
    return spag(GatedOptimizer(), *args, **more)


VARIANTS = [trust_region_step, closed_form_step, reference_step, preconditioned_step, gated_step]
Scalar = Callable[[list[Tensor]], Tensor]


def start(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in [(3, 2), (5,)]]


def value(scalar: Tensor) -> float:
    return float(scalar.detach())


def task(theta: list[Tensor], scale: float = 1.0) -> Callable[[], Gradient]:
    def evaluate() -> Gradient:
        loss = scale * sum(((part - 1).square().sum() for part in theta), torch.zeros(()))
        return Gradient(value(loss), list(torch.autograd.grad(loss, theta)), 1.0, 0.0)

    return evaluate


def safe(theta: list[Tensor], **losses: Scalar) -> Callable[[], Mapping[str, Loss]]:
    def evaluate() -> Mapping[str, Loss]:
        scalars = {name: loss(theta) for name, loss in losses.items()}
        return {name: Loss(value(scalar), scalar, theta) for name, scalar in scalars.items()}

    return evaluate


def linear(theta: list[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in theta]).sum() + 20


def squares(theta: list[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in theta]).sum()


def triple(theta: list[Tensor]) -> Tensor:
    return 3 * linear(theta)


def flat(theta: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in theta])


def standing(theta: list[Tensor]) -> Optimizer:
    """A utility optimizer that does not move, to see the safety step alone."""
    return SGD(theta, lr=1e-30)


def test_projection_lands_on_a_linear_constraint() -> None:
    theta = start()
    constraint = Constraint({"mean": 5.0}, eta_safe=1e30)

    trust_region_step(theta, task(theta, 0.0), safe(theta, mean=linear), SGD(theta, lr=1.0), constraint)

    assert value(linear(theta)) == pytest.approx(5.0, abs=1e-4)


def test_closed_form_is_the_papers_formula() -> None:
    theta, twin = ([part.detach().double().requires_grad_() for part in start()] for _ in range(2))
    lr, tau = 0.05, 1.0

    closed_form_step(theta, task(theta), safe(theta, mean=squares), SGD(theta, lr=lr), Constraint({"mean": tau}))

    with torch.no_grad():
        for part in twin:
            part.sub_(2 * (part - 1), alpha=lr)
        g = [2 * part for part in twin]
        alpha = min((value(squares(twin)) - tau) / value(sum(((part * part).sum() for part in g), torch.zeros(()))), lr)
        for part, along in zip(twin, g, strict=True):
            part.add_(along, alpha=-alpha)
    torch.testing.assert_close(flat(theta), flat(twin), rtol=0, atol=1e-12)


def test_closed_form_caps_alpha_at_the_learning_rate() -> None:
    theta = start()
    found = closed_form_step(
        theta, task(theta), safe(theta, mean=linear), SGD(theta, lr=1e-4), Constraint({"mean": 0.0})
    )
    assert found["spag/alpha"] == 1e-4
    assert found["spag/capped"] == 1.0


@pytest.mark.parametrize("eta_safe", ["auto", 0.5, 3.0])
def test_the_trust_region_bounds_the_step_in_units_of_the_utility_optimizer(eta_safe: float | str) -> None:
    theta, before = start(), flat(start())
    constraint = Constraint({"mean": -1e6}, eta_safe=eta_safe)  # type: ignore[arg-type]
    lr = 0.01

    trust_region_step(theta, task(theta, 0.0), safe(theta, mean=squares), SGD(theta, lr=lr), constraint)

    multiple = 1.0 if eta_safe == "auto" else float(eta_safe)
    assert float((flat(theta) - before).norm()) == pytest.approx(multiple * lr * math.sqrt(size(theta)), rel=1e-4)


def test_the_trust_region_leaves_the_utility_moments_alone() -> None:
    theta, twin = start(), start()
    defended, plain = AdamW(theta, lr=0.1), AdamW(twin, lr=0.1)

    trust_region_step(theta, task(theta), safe(theta, mean=linear), defended, Constraint({"mean": 0.0}))
    make_step(NoDefense(), {})(twin, task(twin), safe(twin), plain)

    for part, same in zip(theta, twin, strict=True):
        for key, value in plain.state[same].items():
            assert torch.equal(defended.state[part][key], value)
    assert not torch.equal(flat(theta), flat(twin))


@pytest.mark.parametrize("step", VARIANTS)
def test_a_safe_model_is_left_untouched(step: Any) -> None:
    theta, twin = start(), start()
    defended, plain = AdamW(theta, lr=0.1), AdamW(twin, lr=0.1)
    random_state = torch.get_rng_state()

    found = step(theta, task(theta), safe(theta, mean=linear), defended, Constraint({"mean": 1e6}))
    make_step(NoDefense(), {})(twin, task(twin), safe(twin), plain)

    assert torch.equal(flat(theta), flat(twin))
    assert str(defended.state_dict()) == str(plain.state_dict())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert found["spag/triggered"] == 0.0


@pytest.mark.parametrize("step", VARIANTS)
def test_a_violation_within_delta_is_ignored(step: Any) -> None:
    theta = start()
    before = flat(theta)
    optimizer = AdamW(theta, lr=1e-3, weight_decay=0.0)
    constraint = Constraint({"mean": value(linear(theta)) - 0.5}, delta=0.6)

    found = step(theta, task(theta, 0.0), safe(theta, mean=linear), optimizer, constraint)

    assert found["spag/triggered"] == 0.0
    assert torch.equal(flat(theta), before)


@pytest.mark.parametrize("step", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_safe_loss_that_is_not_finite_ends_the_run(step: Any, bad: float) -> None:
    theta = start()
    with pytest.raises(NonFiniteLoss, match="safe"):
        step(
            theta,
            task(theta),
            safe(theta, mean=lambda theta: linear(theta) * bad),
            standing(theta),
            Constraint({"mean": 0.0}),
        )


def test_a_task_loss_that_is_not_finite_ends_the_run_before_the_step() -> None:
    theta = start()
    before = flat(theta)
    with pytest.raises(NonFiniteLoss, match="task"):
        make_step(NoDefense(), {})(theta, task(theta, math.nan), safe(theta), SGD(theta, lr=0.1))
    assert torch.equal(flat(theta), before)


@pytest.mark.parametrize("step", VARIANTS)
def test_a_safety_gradient_that_is_not_finite_leaves_the_utility_step(step: Any) -> None:
    def steep(theta: list[Tensor]) -> Tensor:
        return (theta[1] * 0).sum().sqrt() + 7  # a finite value with an infinite slope

    theta, twin = start(), start()
    found = step(
        theta,
        task(theta),
        safe(theta, mean=steep),
        AdamW(theta, lr=0.1),
        Constraint({"mean": 0.0}),
    )
    make_step(NoDefense(), {})(twin, task(twin), safe(twin), AdamW(twin, lr=0.1))

    assert torch.equal(flat(theta), flat(twin))
    assert found["spag/skipped"] == 1.0


def test_the_more_violated_of_two_constraints_is_projected_on() -> None:
    theta, twin = start(), start()
    both = Constraint({"mean": 0.0, "prefix": 0.0}, eta_safe=1e30)

    trust_region_step(theta, task(theta, 0.0), safe(theta, mean=linear, prefix=triple), SGD(theta, lr=1.0), both)

    assert value(triple(theta)) == pytest.approx(0.0, abs=1e-4)
    found = trust_region_step(
        twin,
        task(twin, 0.0),
        safe(twin, mean=linear, prefix=triple),
        SGD(twin, lr=1.0),
        Constraint({"mean": 0.0, "prefix": 1e6}, eta_safe=1e30),
    )
    assert value(linear(twin)) == pytest.approx(0.0, abs=1e-4)
    assert found["loss/safe_prefix"] == pytest.approx(3 * found["loss/safe"])


@pytest.mark.parametrize("variant", get_args(Variant))
def test_variants_are_picked_by_name(variant: Variant) -> None:
    defense = Spard(variant=variant, delta=0.3, eta_safe=2.0, margin=0.1, check_every=1)
    correct_ = safety_half(defense).correct_
    kind = type(correct_).__name__ if variant == "gated" else correct_.__name__  # type: ignore[attr-defined]
    name = {"precondition_": "preconditioned", "GatedOptimizer": "gated"}.get(kind, kind.rstrip("_"))
    assert make_constraint(defense, {"mean": 1.0}) == Constraint({"mean": 1.0}, 0.3, 2.0, 0.1)
    assert name == variant

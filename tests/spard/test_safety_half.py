"""When the safety half of SPAG looks, what it remembers, and what a correction is told and tells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from spard.config import Spard, Variant
from spard.losses.cross_entropy import Evaluation
from spard.losses.gradients import Gradient, Loss
from spard.losses.vectors import Vector
from spard.methods.base import Metrics, Plan
from spard.methods.constraint import (
    Constraint,
    Violation,
    halfspace_step,
    learning_rate,
    metric,
    most_violated,
    or_auto,
    precondition_,
    project_,
    step_metrics,
    trust_region_,
    values,
)
from spard.methods.spag import SafetyHalf, Spag, base_tau, safety_half

NOTHING = {"spag/alpha": 0.0, "spag/triggered": 0.0, "spag/capped": 0.0, "spag/skipped": 0.0, "spag/step": 0.0}


class Remembering:
    """A correction that counts its calls and takes the count along."""

    def __init__(self) -> None:
        self.calls, self.restored = 0, dict[str, Tensor]()

    def __call__(self, theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        self.calls += 1
        return step_metrics(triggered=True)

    def state(self) -> dict[str, Tensor]:
        return {"calls": torch.tensor(self.calls)}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        self.restored = dict(state)


def point(*at: float) -> list[Tensor]:
    return [torch.tensor(at, dtype=torch.float64, requires_grad=True)]


def loss(theta: list[Tensor], slope: float = 1.0) -> Loss:
    """`slope` times the sum of theta."""
    scalar = slope * theta[0].sum()
    return Loss(float(scalar.detach()), scalar, theta)


def looks(half: SafetyHalf, steps: int) -> list[int]:
    """The steps, counted from 1, in which it looks."""
    theta = point(1.0)
    optimizer = SGD(theta, lr=1.0)
    constraint = Constraint({"mean": 0.0})
    return [i for i in range(1, steps + 1) if half(theta, lambda: {"mean": loss(theta)}, optimizer, constraint)]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every": 3}, [3, 6]),
        ({"every": 3, "total_steps": 8}, [3, 6, 8]),
        ({"every": 4, "total_steps": 8}, [4, 8]),
    ],
)
def test_it_looks_at_every_kth_step_and_after_the_last(more: dict[str, int], expected: list[int]) -> None:
    assert looks(SafetyHalf(Remembering(), **more), 8) == expected


def test_its_clock_goes_on_from_a_checkpoint() -> None:
    half = SafetyHalf(Remembering(), every=3)
    looks(half, 4)
    state = half.state()
    assert {name: int(each) for name, each in state.items()} == {"clock": 4, "calls": 1}

    fresh = SafetyHalf(Remembering(), every=3)
    fresh.restore(point(1.0), state)
    assert fresh.correct_.restored == {"calls": torch.tensor(1)}  # type: ignore[attr-defined]
    assert looks(fresh, 3) == [2]


def test_it_keeps_no_clock_where_it_looks_at_every_step() -> None:
    assert SafetyHalf(trust_region_).state() == {}
    assert set(SafetyHalf(trust_region_, every=2).state()) == {"clock"}
    half = SafetyHalf(trust_region_)
    half.restore(point(1.0), {})
    assert half.clock == 0


def test_a_look_without_a_violation_reports_the_loss_and_no_move() -> None:
    theta = point(1.0)
    found = SafetyHalf(Remembering())(
        theta, lambda: {"mean": loss(theta)}, SGD(theta, lr=1.0), Constraint({"mean": 1.0})
    )
    assert found == {"loss/safe": 1.0} | NOTHING


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"constraint": "mean", "tau": 3.0}, {"mean": 3.0}),
        ({"constraint": "both", "tau": 3.0}, {"mean": 3.0, "prefix": 3.0}),
        ({"constraint": "prefix"}, {"prefix": 2.0}),
        ({"constraint": "both"}, {"mean": 1.0, "prefix": 2.0}),
    ],
)
def test_tau_is_as_asked_or_the_base_model_s_own(settings: dict[str, Any], expected: dict[str, float]) -> None:
    own = Evaluation(loss=1.0, prefix_loss=2.0, accuracy=0.0, tokens=1)
    defense = Spard(**settings)
    assert base_tau(defense, lambda: own) == expected
    assert Spag(defense).measure_tau(lambda: own) == expected


def test_the_method_steps_on_its_task_and_then_on_its_constraint() -> None:
    method = Spag(Spard(variant="trust_region", check_every=2, safe_batch_size=5, eta_safe=1e6))
    theta = point(1.0, 3.0)
    optimizer = SGD(theta, lr=1.0)
    assert method.safe_batch_size(64) == 5
    method.start(Plan(tau={"mean": 1.0}, total_steps=3))

    found = [
        method.step(
            theta,
            lambda: Gradient(7.0, [torch.zeros(2, dtype=torch.float64)], 1.0, 0.5),
            lambda: {"mean": loss(theta)},
            optimizer,
        )
        for _ in range(3)
    ]

    assert float(theta[0].detach().sum()) == pytest.approx(1.0)
    assert ["loss/safe" in each for each in found] == [False, True, True]
    assert all(each["loss/task"] == 7.0 for each in found)
    state = method.state()
    again = Spag(method.settings)
    again.start(Plan(tau={"mean": 1.0}, total_steps=3))
    again.restore(theta, state)
    assert again.safety.clock == 3


def test_a_loss_at_its_bound_is_no_violation() -> None:
    theta = point(2.0)
    for bound, delta, violated in ((2.0, 0.0, False), (1.5, 0.5, False), (1.9, 0.0, True), (2.1, 0.0, False)):
        found = most_violated({"mean": loss(theta)}, Constraint({"mean": bound}, delta=delta))
        assert (found is not None) == violated, bound


def test_a_constraint_ignores_nothing_and_aims_at_tau_unless_asked() -> None:
    assert Constraint({"mean": 1.0}) == Constraint({"mean": 1.0}, delta=0.0, eta_safe="auto", margin=0.0, every=1)
    theta = point(1.0)
    assert Violation(loss(theta), 2.0).descent == 2.0
    assert Violation(loss(theta), 2.0, margin=0.25).descent == 2.25


def test_a_projection_tells_how_far_it_went_and_whether_it_was_held_back() -> None:
    theta = point(1.0, 2.0)
    free = project_(theta, Violation(loss(theta, 2.0), excess=4.0))
    assert theta[0].tolist() == pytest.approx([0.0, 1.0])
    assert free == NOTHING | {
        "spag/alpha": 0.5,
        "spag/triggered": 1.0,
        "spag/step": pytest.approx(0.5 * math.sqrt(8)),
    }
    held = project_(theta, Violation(loss(theta, 2.0), excess=4.0), radius=0.25 * math.sqrt(8))
    assert held["spag/alpha"] == pytest.approx(0.25)
    assert held["spag/capped"] == 1.0
    exact = project_(theta, Violation(loss(theta, 2.0), excess=4.0), eta_safe=0.5)
    assert (exact["spag/alpha"], exact["spag/capped"]) == (0.5, 1.0)


def test_a_flat_loss_moves_nothing() -> None:
    theta = point(1.0)
    found = project_(theta, Violation(loss(theta, 0.0), excess=4.0))
    assert theta[0].tolist() == [1.0]
    assert found == NOTHING | {"spag/triggered": 1.0}


@pytest.mark.parametrize("variant", get_args(Variant))
def test_no_cap_shortens_the_step_along_a_gradient_of_zero(variant: Variant) -> None:
    theta = point(1.0)
    optimizer = AdamW(theta, lr=0.1)
    theta[0].grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    correction = safety_half(Spard(variant=variant)).correct_
    found = correction(theta, Violation(loss(theta, 0.0), excess=4.0), optimizer, Constraint({"mean": 0.0}))
    assert (found["spag/triggered"], found["spag/capped"]) == (1.0, 0.0)


@pytest.mark.parametrize("variant", get_args(Variant))
def test_a_correction_reports_how_far_it_moved_the_parameters(variant: Variant) -> None:
    """Also where the step is that of an optimizer with momentum and weight decay."""
    theta = point(1.0, 2.0)
    optimizer = AdamW(theta, lr=0.1, weight_decay=0.1)
    theta[0].grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    optimizer.step()
    correction, constraint = safety_half(Spard(variant=variant)).correct_, Constraint({"mean": 0.0})
    for scale in (3.0, 0.5):
        before, scalar = theta[0].detach().clone(), scale * theta[0].square().sum()
        violation = Violation(Loss(float(scalar.detach()), scalar, theta), excess=4.0)
        found = correction(theta, violation, optimizer, constraint)
        assert found["spag/step"] == pytest.approx(float((theta[0].detach() - before).norm()))
        assert found["spag/step"] > 0


def test_a_preconditioned_step_is_capped_if_any_of_its_coordinates_is() -> None:
    """Where the task has no gradient, Adam's metric is tiny and a coordinate exceeds the cap though lambda does not."""
    found = {}
    for name, slopes in {"tiny metric": [1e-6, 1.0], "even metric": [1.0, 1.0]}.items():
        theta = point(1.0, 2.0)
        optimizer = AdamW(theta, lr=0.1)
        theta[0].grad = torch.tensor(slopes, dtype=torch.float64)
        optimizer.step()
        violation = Violation(loss(theta), excess=0.1)
        found[name] = precondition_(theta, violation, optimizer, Constraint({"mean": 0.0}, eta_safe=1.0))
    assert {name: each["spag/capped"] for name, each in found.items()} == {"tiny metric": 1.0, "even metric": 0.0}
    assert all(each["spag/alpha"] < 0.1 for each in found.values())


def test_a_preconditioned_step_is_capped_if_lambda_alone_is() -> None:
    theta = point(1.0, 2.0)
    optimizer = AdamW(theta, lr=0.1)
    theta[0].grad = torch.tensor([2.0, 2.0], dtype=torch.float64)
    optimizer.step()
    found = precondition_(theta, Violation(loss(theta), excess=9.0), optimizer, Constraint({"mean": 0.0}, eta_safe=1.0))
    assert (found["spag/alpha"], found["spag/capped"]) == (0.1, 1.0)
    assert found["spag/step"] == pytest.approx(0.05 * math.sqrt(2))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_adam_s_metric_of_a_gradient_that_stays_is_its_size_from_the_first_step(steps: int) -> None:
    theta = point(1.0, 2.0)
    optimizer = AdamW(theta, lr=0.1)
    theta[0].grad = torch.tensor([0.5, -2.0], dtype=torch.float64)
    for _ in range(steps):
        optimizer.step()
    (H,) = metric(theta, optimizer)
    assert H.tolist() == pytest.approx([0.5, 2.0])


def test_a_gradient_that_is_not_finite_is_counted() -> None:
    theta = point(0.0)
    steep = theta[0].sum().sqrt()
    found = project_(theta, Violation(Loss(1.0, steep, theta), excess=1.0))
    assert found == NOTHING | {"spag/triggered": 1.0, "spag/skipped": 1.0}


@pytest.mark.parametrize(
    ("violation", "sq_norm", "most", "alpha"),
    [
        (2.0, 4.0, math.inf, 0.5),
        (2.0, 4.0, 0.25, 0.25),
        (0.5, 0.25, math.inf, 2.0),
        (0.0, 4.0, math.inf, 0.0),
        (-0.5, 4.0, math.inf, 0.0),
        (2.0, 0.0, 1.0, 0.0),
    ],
)
def test_the_step_onto_a_halfspace(violation: float, sq_norm: float, most: float, alpha: float) -> None:
    assert halfspace_step(violation, sq_norm, most) == alpha


@pytest.mark.parametrize("every", [1, 4])
def test_the_trust_region_grows_with_the_steps_between_two_looks(every: int) -> None:
    theta = point(1.0, 2.0, 3.0)
    before = theta[0].detach().clone()
    constraint = Constraint({"mean": 0.0}, every=every)
    found = trust_region_(theta, Violation(loss(theta), excess=1e6), SGD(theta, lr=0.5), constraint)
    assert found["spag/step"] == pytest.approx(0.5 * math.sqrt(3 * every))
    assert float((theta[0].detach() - before).norm()) == pytest.approx(0.5 * math.sqrt(3 * every))


def test_the_rate_is_that_of_the_first_group() -> None:
    one, two = point(1.0), point(2.0)
    assert learning_rate(SGD([{"params": one, "lr": 0.25}, {"params": two, "lr": 0.5}])) == 0.25


def test_auto_stands_for_what_the_variant_says() -> None:
    assert (or_auto("auto", 3.0), or_auto(2.0, 3.0)) == (3.0, 2.0)


def test_metrics_have_the_names_of_their_losses() -> None:
    theta = point(1.5)
    assert values({name: loss(theta) for name in ("mean", "prefix", "other")}) == {
        "loss/safe": 1.5,
        "loss/safe_prefix": 1.5,
        "loss/safe_other": 1.5,
    }
    assert step_metrics() == NOTHING

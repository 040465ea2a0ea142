"""The `reference` variant against the rules of the authors' trainer, written down independently."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.losses.gradients import Gradient, Loss
from spard.methods.base import utility_step_
from spard.methods.constraint import Constraint, reference_
from spard.methods.spag import SafetyHalf


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (5,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def squares(theta: list[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in theta]).sum()


def task(theta: list[Tensor]) -> Callable[[], Gradient]:
    def evaluate() -> Gradient:
        loss = sum(((part - 1).square().sum() for part in theta), torch.zeros(()))
        return Gradient(float(loss.detach()), list(torch.autograd.grad(loss, theta)), 1.0, 0.0)

    return evaluate


def safe(theta: list[Tensor]) -> Callable[[], Mapping[str, Loss]]:
    return lambda: {"mean": Loss(float(squares(theta).detach()), squares(theta), theta)}


def flat(theta: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in theta])


def official_code(theta: list[Tensor], optimizer: Optimizer, tau: float, delta: float, alpha_max: float) -> None:
    """What the authors' trainer does in one step: D1-D7 of the comparison of paper and code."""
    sum(((part - 1).square().sum() for part in theta), torch.zeros(())).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = squares(theta)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(theta, 1.0)
    if loss.item() > tau + delta:
        for part in theta:
            assert part.grad is not None
            alpha = min((loss.item() - tau) / (part.grad.norm().item() + 1e-8), alpha_max)
            part.grad.data.mul_(alpha)
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tau", [0.2, 4.0])
def test_reference_is_the_authors_code(tau: float) -> None:
    theta, twin = start(), start()
    ours, theirs = (AdamW(each, lr=0.1, weight_decay=0.01) for each in (theta, twin))
    constraint = Constraint({"mean": tau}, delta=0.1)
    safety_half, triggered = SafetyHalf(reference_), 0.0

    for _ in range(12):
        utility_step_(theta, task(theta), ours)
        triggered += safety_half(theta, safe(theta), ours, constraint)["spag/triggered"]
        official_code(twin, theirs, tau, 0.1, 1.0)

    torch.testing.assert_close(flat(theta), flat(twin), rtol=0, atol=1e-9)
    assert triggered > 0

"""Two parameters and losses whose gradients can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from spard.config import Defense
from spard.losses.gradients import Gradient, Loss
from spard.methods import open_method
from spard.methods.base import Plan

Theta = list[Tensor]


def point(x: float = 1.0, y: float = 2.0) -> Theta:
    return [torch.tensor([x], requires_grad=True), torch.tensor([y], requires_grad=True)]


def values(theta: Theta) -> list[float]:
    return [float(part.detach()) for part in theta]


def task(theta: Theta, gx: float, gy: float) -> Callable[[], Gradient]:
    """The linear loss gx x + gy y."""

    def evaluate() -> Gradient:
        loss = gx * theta[0] + gy * theta[1]
        return Gradient(float(loss.detach()), list(torch.autograd.grad(loss.sum(), theta)), (gx**2 + gy**2) ** 0.5, 0.5)

    return evaluate


def safe(theta: Theta, name: str, gx: float, gy: float) -> Callable[[], Mapping[str, Loss]]:
    """The linear loss gx x + gy y under a name."""

    def evaluate() -> Mapping[str, Loss]:
        loss = (gx * theta[0] + gy * theta[1]).sum()
        return {name: Loss(float(loss.detach()), loss, theta)}

    return evaluate


def make_step(
    defense: Defense, tau: Mapping[str, float], total_steps: int = 0, max_norm: float = math.inf
) -> Callable[..., dict[str, float]]:
    """The iteration of a defense's method, started."""
    method: Any = open_method(defense)
    method.start(Plan(tau, total_steps, max_norm))
    step: Callable[..., dict[str, float]] = method.step
    return step

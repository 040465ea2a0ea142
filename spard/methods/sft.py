"""Plain supervised fine-tuning: the undefended baseline."""

from __future__ import annotations

from torch.optim import Optimizer

from spard.grads import Losses, ValueAndGrad
from spard.methods.base import Metrics, utility_step_
from spard.vectors import Vector


def sft_step(theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
    """One utility step; the safe losses are not looked at."""
    return utility_step_(theta, task, optimizer)

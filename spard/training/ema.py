"""A moving average of the weights, released in place of the last ones (Kim et al., 2025).

    mean <- d mean + (1 - d) theta   after every step, from the model before training on

Averaging from the start keeps the result near the aligned model, the more the shorter the run: after T steps the start
still has the weight d^T.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    """The average of named parameters."""

    def __init__(self, theta: Mapping[str, Tensor], decay: float) -> None:
        self.theta, self.decay = theta, decay
        self.mean = {name: part.detach().clone() for name, part in theta.items()}

    @torch.no_grad()
    def update_(self) -> None:
        """Take in the parameters as they are."""
        torch._foreach_lerp_(list(self.mean.values()), list(self.theta.values()), 1 - self.decay)

    @torch.no_grad()
    def release_(self) -> None:
        """Put the average into the model."""
        for name, part in self.theta.items():
            part.copy_(self.mean[name])

    def restore(self, mean: Mapping[str, Tensor]) -> None:
        """Continue with this average."""
        self.mean = {name: mean[name].to(part.device) for name, part in self.theta.items()}

"""An exponential moving average of the weights, released instead of the last weights (Kim et al., 2025).

    mean <- d mean + (1 - d) theta   after every step, starting with the weights before training

Because the average starts at the model before training, the result stays near it, the more so the shorter the run:
after T steps the start still has weight d^T.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    """The moving average of named parameters."""

    def __init__(self, theta: Mapping[str, Tensor], decay: float) -> None:
        self.theta, self.decay = theta, decay
        self.mean = {name: part.detach().clone() for name, part in theta.items()}

    @torch.no_grad()
    def update_(self) -> None:
        """Add the current parameters to the average."""
        torch._foreach_lerp_(list(self.mean.values()), list(self.theta.values()), 1 - self.decay)

    @torch.no_grad()
    def release_(self) -> None:
        """Copy the average into the model."""
        for name, part in self.theta.items():
            part.copy_(self.mean[name])

    def restore(self, mean: Mapping[str, Tensor]) -> None:
        """Replace the average by one from a resume state."""
        self.mean = {name: mean[name].to(part.device) for name, part in self.theta.items()}

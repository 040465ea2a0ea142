r"""Lisa (Huang et al., 2024): alternate between two states that a proximal term holds together.

K1 steps on safe batches come before every K2 steps on training batches; in both states

    theta <- AdamW(theta, grad L(batch) + rho (theta - theta_other)),

where theta_other are the parameters at the end of the other state's last turn. The proximal term is off during the
first tenth of the run. One optimizer serves both states; its moments are never reset.

Differences from the authors' code: the state changes between optimizer steps, never inside an accumulated batch; no
training batch is discarded for a safe one, so an epoch covers all training rows; rho (theta - theta_other) is added
once to the accumulated gradient; K1 and K2 are a few steps (see the settings).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.config import Lisa as LisaSettings
from spard.losses.gradients import Losses, ValueAndGrad
from spard.losses.vectors import Vector, add_, norm, shorten_
from spard.methods.base import Method, Metrics, Plan, descend_, report, require_finite

PROXIMAL_FROM = 0.1  # share of the run before the proximal term begins

_ALIGNED, _TUNED, _CLOCK = "aligned", "tuned", "clock"


class Lisa(Method[LisaSettings]):
    """A step on a training batch, preceded every K2 steps by K1 steps of alignment on safe batches."""

    clips_gradients = True

    def start(self, plan: Plan) -> None:
        """Set the counters so that the run begins with alignment."""
        self.plan = plan
        self.clock = 0
        self.ended: dict[str, list[Tensor]] = {}  # parameters at the end of each state's last turn

    def safe_batch_size(self, batch_size: int) -> int:
        """Return the setting `safe_batch_size`; "auto" is the batch size of the run."""
        return batch_size if self.settings.safe_batch_size == "auto" else self.settings.safe_batch_size

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """Run the alignment steps if they are due, then take the utility step, both with the proximal term."""
        # Alignment:  K1 steps on safe batches, pulled toward the end of the last tuning
        aligned: Metrics = {}
        if self.clock % self.settings.task_steps == 0:
            # Before the first tuning step there is no end of tuning: the first alignment has no proximal term.
            if self.clock:
                self.ended[_TUNED] = _copy(theta)
            for _ in range(self.settings.align_steps):
                aligned = self._align_(theta, safe, optimizer)
            self.ended[_ALIGNED] = _copy(theta)

        # Tuning:  a step on a training batch, pulled toward the end of the last alignment
        found = task()
        require_finite("task", found.loss, found.norm)
        drift = self._descend_(theta, found.grad, optimizer, _ALIGNED)
        self.clock += 1
        return report(found) | {"lisa/drift": drift} | aligned

    def state(self) -> dict[str, Tensor]:
        """Return the step counter and the parameters at the end of each state, by name."""
        ends = {f"{name}/{i}": part for name, end in self.ended.items() for i, part in enumerate(end)}
        return {_CLOCK: torch.tensor(self.clock), **ends}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore the step counter and both states' parameters."""
        self.clock = int(state[_CLOCK])
        names = {name.partition("/")[0] for name in state if name != _CLOCK}
        self.ended = {
            name: [state[f"{name}/{i}"].to(part.device) for i, part in enumerate(theta)] for name in sorted(names)
        }

    def _align_(self, theta: Vector, safe: Losses, optimizer: Optimizer) -> Metrics:
        loss = safe()["mean"]
        require_finite("safe", loss.value)
        self._descend_(theta, loss.grad(), optimizer, _TUNED)
        return {"loss/safe": loss.value}

    def _descend_(self, theta: Vector, grad: Vector, optimizer: Optimizer, other: str) -> float:
        """Take one step with the proximal term, if it has begun; return |theta - theta_other|."""
        drift = theta[0].new_zeros(())
        if other in self.ended:
            away = [part.detach() - end for part, end in zip(theta, self.ended[other], strict=True)]
            drift = norm(away)
            if self.clock >= PROXIMAL_FROM * self.plan.total_steps:
                add_(grad, away, self.settings.rho)
        # Read both numbers in one transfer: each `.tolist()` makes the CPU wait for the GPU.
        length, moved = torch.stack([shorten_(grad, self.plan.max_grad_norm), drift]).tolist()
        require_finite("combined", length)
        descend_(optimizer, theta, grad)
        return float(moved)


def _copy(theta: Vector) -> list[Tensor]:
    return [part.detach().clone() for part in theta]

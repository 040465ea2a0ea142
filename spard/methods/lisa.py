r"""Lisa (Huang et al., 2024): two alternating states with a proximal term.

Before every K2 steps on training batches there are K1 steps on safe batches; in both states

    theta <- AdamW(theta, grad L(batch) + rho (theta - theta_other)),

theta_other being where the other state last ended. The proximal term is off during the first tenth of the run. One
optimizer serves both states, its moments are never reset.

Differences from the authors' code: states change between optimizer steps, never inside an accumulated batch; no
training batch is thrown away for a safe one, so an epoch is an epoch; the term's gradient rho (theta - theta_other) is
added once to the accumulated gradient; K1 and K2 are a few steps, see its settings.
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
    """One step on a training batch, after a turn of alignment where one is due."""

    clips_gradients = True

    def start(self, plan: Plan) -> None:
        """Begin with alignment."""
        self.plan = plan
        self.clock = 0
        self.ended: dict[str, list[Tensor]] = {}  # where each state last ended

    def safe_batch_size(self, batch_size: int) -> int:
        """As asked, or the batch size of the run."""
        return batch_size if self.settings.safe_batch_size == "auto" else self.settings.safe_batch_size

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """Align for some steps when its turn has come, then take the utility step, both with the proximal term."""
        # Alignment:  K1 steps on safe batches, drawn to where tuning ended
        aligned: Metrics = {}
        if self.clock % self.settings.task_steps == 0:
            if self.clock:
                self.ended[_TUNED] = _copy(theta)
            for _ in range(self.settings.align_steps):
                aligned = self._align_(theta, safe, optimizer)
            self.ended[_ALIGNED] = _copy(theta)

        # Tuning:  a step on a training batch, drawn to where alignment ended
        found = task()
        require_finite("task", found.loss, found.norm)
        drift = self._descend_(theta, found.grad, optimizer, _ALIGNED)
        self.clock += 1
        return report(found) | {"lisa/drift": drift} | aligned

    def state(self) -> dict[str, Tensor]:
        """Clock and both ends, as tensors."""
        ends = {f"{name}/{i}": part for name, end in self.ended.items() for i, part in enumerate(end)}
        return {_CLOCK: torch.tensor(self.clock), **ends}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
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
        """One step with the proximal term, if it has begun; |theta - theta_other|."""
        drift = theta[0].new_zeros(())
        if other in self.ended:
            away = [part.detach() - end for part, end in zip(theta, self.ended[other], strict=True)]
            drift = norm(away)
            if self.clock >= PROXIMAL_FROM * self.plan.total_steps:
                add_(grad, away, self.settings.rho)
        length, moved = torch.stack([shorten_(grad, self.plan.max_grad_norm), drift]).tolist()
        require_finite("combined", length)
        descend_(optimizer, theta, grad)
        return float(moved)


def _copy(theta: Vector) -> list[Tensor]:
    return [part.detach().clone() for part in theta]

r"""SPAG with a step that is capped in the units of the utility optimizer; the default variant.

    alpha = min((l - tau) / |g|^2, R / |g|),   R = eta_safe lr sqrt(N k)

for N parameters and an evaluation of the safe loss every k steps. The paper caps alpha by the learning rate: a length
in units of plain gradient descent, which under AdamW is far too short to matter. R is about as far as AdamW moves in
k steps. The step changes theta directly, without the optimizer. With a margin m it aims at tau - m, because an exact
projection leaves the model on the boundary.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from spard.losses.vectors import Vector, size
from spard.methods.base import Metrics
from spard.methods.constraint import Constraint, Correction, Violation, learning_rate, or_auto, project_


def correction() -> Correction:
    """Return the correction; it has no state, so all runs share the function."""
    return trust_region_


def trust_region_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Project, moving theta at most as far as the utility optimizer may have moved it since the last evaluation."""
    reach = learning_rate(optimizer) * math.sqrt(size(theta) * constraint.every)
    return project_(theta, violation, radius=or_auto(constraint.eta_safe, 1.0) * reach)

"""SPAG as printed in the paper: alpha = min((l - tau) / |g|^2, eta_safe), with eta_safe = lr.

With a margin m it aims at tau - m, because an exact projection leaves the model on the boundary.
"""

from __future__ import annotations

from torch.optim import Optimizer

from spard.losses.vectors import Vector
from spard.methods.base import Metrics
from spard.methods.constraint import Constraint, Correction, Violation, learning_rate, or_auto, project_


def correction() -> Correction:
    """Return the correction; it has no state, so all runs share the function."""
    return closed_form_


def closed_form_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Correct theta as in Algorithm 1; the cap on alpha is in units of plain gradient descent."""
    return project_(theta, violation, eta_safe=or_auto(constraint.eta_safe, learning_rate(optimizer)))

"""Step lengths of projections onto a linearised constraint."""

from __future__ import annotations


def halfspace_step(violation: float, sq_norm: float, max_step: float) -> float:
    r"""Step length alpha that projects theta onto a linearised safety constraint.

    The point of {theta' : l(theta) + g.(theta' - theta) <= tau} nearest to theta is theta - alpha g with
    alpha = [l(theta) - tau]_+ / |g|^2 (SPARD, Algorithm 1). `max_step` caps alpha: the linear model is trusted only
    nearby. `violation` is l(theta) - tau and `sq_norm` is |g|^2.
    """
    return min(violation / sq_norm, max_step) if violation > 0 and sq_norm > 0 else 0.0

"""Training methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from spard.config import Defense, NoDefense
from spard.methods.base import Step
from spard.methods.sft import sft_step
from spard.methods.spag import Constraint, closed_form_step, reference_step, trust_region_step

__all__ = ["Step", "step_of"]


def step_of(defense: Defense, tau: Mapping[str, float]) -> Step:
    """The iteration that a recipe asks for; `tau` bounds each constrained safe loss."""
    if isinstance(defense, NoDefense):
        return sft_step
    constraint = Constraint(tau, defense.delta, defense.eta_safe)
    match defense.variant:
        case "trust_region":
            return partial(trust_region_step, constraint=constraint)
        case "closed_form":
            return partial(closed_form_step, constraint=constraint)
        case "reference":
            return partial(reference_step, constraint=constraint)
        case _:
            assert_never(defense.variant)

"""Training methods by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import assert_never

from spard.config import Defense, Lisa, NoDefense, Ptst, SafeGrad, SafeInstr, SafeLora, Spard, Variant
from spard.methods.base import Stateful, Step
from spard.methods.gated import Gated
from spard.methods.lisa import LisaStep
from spard.methods.periodic import Periodic
from spard.methods.preconditioned import preconditioned_
from spard.methods.reference import reference_
from spard.methods.safegrad import safegrad_step
from spard.methods.sft import sft_step
from spard.methods.spag import Constraint, SafetyStep, SpagStep, closed_form_, trust_region_

__all__ = ["Stateful", "Step", "clips_itself", "constraint_of", "safety_of", "step_of"]


def step_of(defense: Defense, tau: Mapping[str, float], total_steps: int = 0, max_norm: float = math.inf) -> Step:
    """The iteration that a recipe asks for; `tau` bounds each constrained safe loss.

    `max_norm` is for the methods that clip the sum of several gradients, see `clips_itself`.
    """
    match defense:
        case NoDefense() | Ptst() | SafeInstr() | SafeLora():
            return sft_step
        case Lisa():
            return LisaStep(defense, total_steps, max_norm)
        case SafeGrad():
            return partial(safegrad_step, rho=defense.rho, max_norm=max_norm)
        case Spard():
            return SpagStep(safety_of(defense, total_steps), constraint_of(defense, tau))
        case _:
            assert_never(defense)


def clips_itself(defense: Defense) -> bool:
    """Whether the task gradient has to reach the method as it is."""
    return isinstance(defense, Lisa | SafeGrad)


def constraint_of(defense: Spard, tau: Mapping[str, float]) -> Constraint:
    """What a recipe bounds, and how strictly."""
    return Constraint(tau, defense.delta, defense.eta_safe, defense.margin, defense.every)


def safety_of(defense: Spard, total_steps: int = 0) -> SafetyStep:
    """The safety half of a SPAG step, as often as the recipe asks; 0 steps in all: nobody knows which is the last."""
    safety = _variant(defense.variant)
    return Periodic(safety, defense.every, total_steps) if defense.every > 1 else safety


def _variant(variant: Variant) -> SafetyStep:
    match variant:
        case "trust_region":
            return trust_region_
        case "preconditioned":
            return preconditioned_
        case "gated":
            return Gated()
        case "closed_form":
            return closed_form_
        case "reference":
            return reference_
        case _:
            assert_never(variant)

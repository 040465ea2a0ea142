"""Training methods by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import assert_never

from spard.config import Defense, Lisa, NoDefense, Ptst, SafeGrad, SafeInstr, SafeLora, Spard
from spard.methods.base import Stateful, Step
from spard.methods.lisa import LisaStep
from spard.methods.safegrad import safegrad_step
from spard.methods.sft import sft_step
from spard.methods.spag import Constraint, closed_form_step, reference_step, trust_region_step

__all__ = ["Stateful", "Step", "clips_itself", "step_of"]


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
            return _spag(defense, tau)
        case _:
            assert_never(defense)


def clips_itself(defense: Defense) -> bool:
    """Whether the task gradient has to reach the method as it is."""
    return isinstance(defense, Lisa | SafeGrad)


def _spag(defense: Spard, tau: Mapping[str, float]) -> Step:
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

"""tau, the bound on the safe loss that SPAG projects onto."""

from __future__ import annotations

from collections.abc import Callable

from spard.config import Spard
from spard.losses import Evaluation


def base_tau(defense: Spard, measure: Callable[[], Evaluation]) -> dict[str, float]:
    """tau for each constrained loss: as asked, or the model's own on the plain safe rows before the first step."""
    names = ("mean", "prefix") if defense.constraint == "both" else (defense.constraint,)
    if defense.tau != "auto":
        return dict.fromkeys(names, defense.tau)
    found = measure()
    own = {"mean": found.loss, "prefix": found.prefix_loss}
    return {name: own[name] for name in names}

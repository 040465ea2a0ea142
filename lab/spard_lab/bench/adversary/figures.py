"""The figures of an adversary bench; none if matplotlib is not installed."""

from __future__ import annotations

from collections.abc import Sequence

from spard_lab.bench.adversary.rounds import Round
from spard_lab.bench.figures import plots


def of_rounds(rounds: Sequence[Round], lab: str) -> dict[str, str]:
    """Return the figure of the rounds by caption, for attacks with at least one trained model."""
    trained = {each.attack for each in rounds if each.answers}
    drawn = plots("spard_lab.bench.adversary.plots") if trained else None
    shown = [each for each in rounds if each.attack in trained]
    return (
        {f"Attacks on {lab}; a dot for each seed, a cross if its job is stopped": drawn.attacks(shown)} if drawn else {}
    )

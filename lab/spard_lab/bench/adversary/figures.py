"""Which figures an adversary bench has; none where matplotlib is not installed."""

from __future__ import annotations

from collections.abc import Sequence

from spard_lab.bench.adversary.rounds import Round
from spard_lab.bench.figures import plots


def of_rounds(rounds: Sequence[Round], lab: str) -> dict[str, str]:
    """Draw what the models of each arm do under each attack whose jobs trained a model; none where no job did."""
    trained = {each.attack for each in rounds if each.answers}
    drawn = plots("spard_lab.bench.adversary.plots") if trained else None
    shown = [each for each in rounds if each.attack in trained]
    return (
        {f"Attacks on {lab}; a dot for each seed, a cross if its job is stopped": drawn.attacks(shown)} if drawn else {}
    )

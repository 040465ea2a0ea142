"""How much less attack success one selection has than the others, seed by seed: labs differ more than selections."""

from __future__ import annotations

from collections.abc import Sequence

from spard.bench.measure import Measurement
from spard.bench.report import Table, figures, spread, summarize

HEADING = "Attack success minus that of another selection, in points, paired by seed [95 % interval of the mean]"


def paired_table(found: Sequence[Measurement]) -> Table:
    """The first selection against each other one, by method, attack and pool; head and rows."""
    asr: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    for each in found:
        value = figures(each)["asr"]
        if each.selection and value is not None:
            place = (each.method, each.attack, each.pool)
            asr.setdefault(place, {}).setdefault(each.selection, {})[each.seed] = value
    rows = []
    for place, by_selection in asr.items():
        first, *others = by_selection
        for other in others:
            both = sorted(by_selection[first].keys() & by_selection[other].keys())
            if both:
                less = summarize([by_selection[first][seed] - by_selection[other][seed] for seed in both])
                rows.append([*place, first, other, spread("asr", less), str(len(both))])
    return ["method", "attack", "pool", "selection", "minus", "difference", "seeds"], rows

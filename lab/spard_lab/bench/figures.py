"""The figures of each kind of table; none if matplotlib is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from spard_lab.bench.cells import BASE
from spard_lab.bench.maps import Map
from spard_lab.bench.measure import Measurement
from spard_lab.bench.overhead import Cost

log = logging.getLogger(__name__)


def plots(module: str = "spard_lab.bench.plots") -> Any:
    """Import a module that draws; return None if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no figures: matplotlib is not installed; pip install spard-lab")
        return None
    return importlib.import_module(module)


def of_methods(found: Sequence[Measurement]) -> dict[str, str]:
    """Return a figure with each method's results on every attack."""
    drawn = plots()
    name = "Methods; a dot for each seed, the mean and its 95 % interval"
    return {name: drawn.dots(found, "method", "attack")} if drawn else {}


def of_curves(found: Sequence[Measurement]) -> dict[str, str]:
    """Return one plot per attack: attack success over task accuracy, with a line for each method's learning rates."""
    drawn = plots()
    return {
        f"Attack {attack}: a point for each learning rate, the lowest one open": drawn.curves(
            [each for each in found if each.attack == attack]
        )
        for attack in (dict.fromkeys(each.attack for each in found) if drawn else ())
    }


def of_selection(found: Sequence[Measurement]) -> dict[str, str]:
    """Return a figure for each pool, with every selection's results by method."""
    drawn, found = plots(), _trained_measurements(found)
    pools = dict.fromkeys(each.pool for each in found)
    return {
        f"Ways to choose the safe set from the pool {pool}": drawn.dots(
            [each for each in found if each.pool == pool], "selection", "method"
        )
        for pool in (pools if drawn else ())
    }


def of_sweep(found: Sequence[Measurement]) -> dict[str, str]:
    """Return a figure for each setting and attack, with the values in the requested order."""
    drawn, figures, found = plots(), {}, _trained_measurements(found)
    for setting, attack in dict.fromkeys((each.setting, each.attack) for each in found):
        rows = [each for each in found if (each.setting, each.attack) == (setting, attack)]
        places = {value: float(i) for i, value in enumerate(dict.fromkeys(each.value for each in rows))}
        if drawn:
            figures[f"{setting}, attack {attack}"] = drawn.lines(rows, places, setting)
    return figures


def of_similarity(found: Sequence[Measurement], distributions: Any) -> dict[str, str]:
    """Return attack success against the levels' mean similarity, and the similarity distributions of the pools."""
    drawn = plots()
    if not drawn:
        return {}
    found = _trained_measurements(found)
    levels = dict.fromkeys(each.value for each in found)
    places = {level: fmean(each.similarity or 0.0 for each in found if each.value == level) for level in levels}
    return {
        "Safe sets of growing similarity": drawn.lines(found, places, "mean q of the safe set"),
        "Similarity of the pools' rows to the training file": drawn.histograms(distributions),
    }


def of_overhead(costs: Sequence[Cost]) -> dict[str, str]:
    """Return a figure of each method's training times as multiples of plain fine-tuning's."""
    drawn = plots()
    return {"Training time; a dot for each round": drawn.bars(costs)} if drawn else {}


def of_maps(found: Sequence[Map]) -> dict[str, str]:
    """Return a figure for each projection of the embeddings to a plane."""
    drawn = plots()
    return {f"Embeddings by {each.projection}": drawn.scatter(each) for each in (found if drawn else ())}


def _trained_measurements(found: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements without the base model's, which have no selection and no setting."""
    return [each for each in found if each.method != BASE]

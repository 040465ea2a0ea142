"""Each method at its best learning rate, chosen on the development split of seeds that no table shows.

The rule: of the rates whose mean task accuracy is within one point of the method's best, the one with the lowest sum
of attack success and over-refusal; of equals the smaller. A figure that could not be measured counts as the worst.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from spard.config import Recipe
from spard.research.bench.bench import Workplace, run_cells
from spard.research.bench.cells import BASE, Asked, Cell, method_cells
from spard.research.bench.measure import Measurement
from spard.research.bench.report import figures
from spard.research.bench.source import Source
from spard.research.bench.store import write_aside

WITHIN = 0.01  # of the best accuracy
FIRST_TUNE_SEED = 101


@dataclass(frozen=True, slots=True)
class Trial:
    """What a method measured at one multiple of the default learning rate, in the mean over the tuning seeds."""

    multiple: float
    accuracy: float
    asr: float
    over_refusal: float


def best(trials: Sequence[Trial]) -> Trial:
    """Return the trial that the rule takes."""
    bar = max(each.accuracy for each in trials) - WITHIN - 1e-12
    return min(
        (each for each in trials if each.accuracy >= bar),
        key=lambda each: (each.asr + each.over_refusal, each.multiple),
    )


def tune(place: Workplace, asked: Asked, multiples: Sequence[float]) -> dict[str, float]:
    """Return the best multiple of every method, on the first attack; the trials are written to tuning.json."""
    asked = replace(asked, attacks=asked.attacks[:1])
    cells = [cell for cell in method_cells(place.source, asked) if cell.method != BASE]
    trials = [(cell.method, multiple, at_rate(cell, multiple)) for cell in cells for multiple in multiples]
    found: dict[tuple[str, float], list[Measurement]] = {}
    for (method, multiple, _), each in zip(trials, run_cells(place, [trial[2] for trial in trials]), strict=True):
        found.setdefault((method, multiple), []).append(each)

    chosen: dict[str, Trial] = {}
    record = {}
    for method in dict.fromkeys(cell.method for cell in cells):
        of_method = [_trial(multiple, found[method, multiple]) for multiple in multiples]
        chosen[method] = best(of_method)
        record[method] = {"multiple": chosen[method].multiple, "trials": [asdict(each) for each in of_method]}
    facts = {"split": place.split, "seeds": asked.seeds, "attack": asked.attacks[0], "methods": record}
    write_aside(place.folder / "tuning.json", json.dumps(facts, indent=2) + "\n")
    return {method: each.multiple for method, each in chosen.items()}


def trial_cells(source: Source, asked: Asked, multiples: Sequence[float]) -> list[Cell]:
    """Return the trainings of `tune`: every method at every rate on the first attack."""
    cells = method_cells(source, replace(asked, attacks=asked.attacks[:1]))
    return [at_rate(cell, multiple) for cell in cells if cell.method != BASE for multiple in multiples]


def at_rate(cell: Cell, multiple: float) -> Cell:
    """Return the cell at a multiple of its learning rate."""
    return replace(cell, recipe=_at_rate(cell.recipe, multiple))


def tune_seeds(taken: Sequence[int], n: int = 2) -> tuple[int, ...]:
    """Seeds apart from those of the tables."""
    free = [seed for seed in range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + n + len(taken)) if seed not in taken]
    return tuple(free[:n])


def _at_rate(recipe: Recipe, multiple: float) -> Recipe:
    asked = recipe.hyperparameters.learning_rate_multiplier
    own = 1.0 if asked == "auto" else asked
    return replace(recipe, hyperparameters=replace(recipe.hyperparameters, learning_rate_multiplier=own * multiple))


def _trial(multiple: float, found: Sequence[Measurement]) -> Trial:
    rows = [figures(each) for each in found]

    def mean(name: str, worst: float) -> float:
        return fmean(worst if row[name] is None else float(row[name] or 0.0) for row in rows)

    return Trial(multiple, mean("accuracy", 0.0), mean("asr", 1.0), mean("over_refusal", 1.0))

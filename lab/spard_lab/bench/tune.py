"""Choose each method's best learning rate on the development split, and draw its curve over all rates.

The rule: of the rates whose mean task accuracy is within one point of the method's best, take the one with the lowest
sum of attack success and over-refusal; of equals, the smaller rate. A missing figure counts as the worst. If a best
rate is at an end of the grid, the grid is extended for every method alike. The choice uses seeds that no table shows.

A single rate per method hides results at other rates, and choosing it is tuning. A curve shows attack success against
task accuracy at all rates, the same ones for all methods; `over_rates` extends the grid for every method if a method's
best rate is at its end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from spard.config import Recipe, auto_multiplier
from spard.replacement import write_atomically
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import BASE, Cell, TableChoices, method_cells
from spard_lab.bench.measure import Measurement
from spard_lab.bench.report import Table, figures, spread, summaries
from spard_lab.bench.source import Source

WITHIN = 0.01  # of the best accuracy
FIRST_TUNE_SEED = 101
EXTEND = 2  # times that the grid may grow
RATE = "learning rate"  # the setting's name in tables; its value is a multiple of the default
OnFound = Callable[[Sequence[Measurement]], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """A method's results at one multiple of the default learning rate, averaged over the tuning seeds."""

    multiple: float
    accuracy: float
    asr: float
    over_refusal: float


def best(trials: Sequence[Trial]) -> Trial:
    """Return the trial that the rule chooses."""
    # The tiny slack keeps a rate exactly one point below the best in spite of rounding.
    bar = max(each.accuracy for each in trials) - WITHIN - 1e-12
    return min(
        (each for each in trials if each.accuracy >= bar),
        key=lambda each: (each.asr + each.over_refusal, each.multiple),
    )


def tune(place: Workplace, asked: TableChoices, multiples: Sequence[float], extend: int = EXTEND) -> dict[str, float]:
    """Return the best multiple of every method, on the first attack; the trials are written to tuning.json."""
    asked = replace(asked, attacks=asked.attacks[:1])
    cells = [cell for cell in method_cells(place.source, asked) if cell.method != BASE]
    found = over_rates(place, cells, multiples, extend)
    trials = collect_trials(found)
    chosen = {method: best(of_method) for method, of_method in trials.items()}
    record = {
        method: {"multiple": chosen[method].multiple, "trials": [asdict(each) for each in of_method]}
        for method, of_method in trials.items()
    }
    facts = {"split": place.split, "seeds": asked.seeds, "attack": asked.attacks[0], "methods": record}
    write_atomically(place.folder / "tuning.json", json.dumps(facts, indent=2) + "\n")
    return {method: each.multiple for method, each in chosen.items()}


def trial_cells(source: Source, asked: TableChoices, multiples: Sequence[float]) -> list[Cell]:
    """Return the trainings of `tune`: every method at every rate on the first attack."""
    cells = method_cells(source, replace(asked, attacks=asked.attacks[:1]))
    return [at_rate(cell, multiple) for cell in cells if cell.method != BASE for multiple in multiples]


def over_rates(
    place: Workplace,
    cells: Sequence[Cell],
    multiples: Sequence[float],
    extend: int = EXTEND,
    on_found: OnFound = lambda found: None,
) -> list[Measurement]:
    """Run every cell at every multiple of its learning rate, which becomes the measurement's `value`.

    If the best rate of a method is the lowest or highest, all methods get one more rate at that end, at most `extend`
    times: all methods have the same budget.
    """
    tried = sorted(_round(each) for each in multiples)
    for left in range(extend, -1, -1):
        # Rates of an earlier pass are found in the store, so only the added ones are trained.
        runs = [at_rate(_name_cell(cell, multiple), multiple) for cell in cells for multiple in tried]
        found = run_cells(place, runs, on_found)
        more = longer(tried, [best(each).multiple for each in collect_trials(found).values()])
        if len(more) == len(tried) or not left:
            break
        log.info("a best learning rate is at the end of %s: every method gets %s", tried, sorted({*more} - {*tried}))
        tried = more
    return found


def longer(multiples: Sequence[float], chosen: Sequence[float]) -> list[float]:
    """Return the rates in order, with one more at each end that is some method's best.

    A single rate is not extended.
    """
    first, *_, last = tried = sorted(multiples) if len(multiples) > 1 else [*multiples, *multiples]
    if first == last:
        return list(multiples)
    below = [_round(first * first / tried[1])] if first in chosen else []
    above = [_round(last * last / tried[-2])] if last in chosen else []
    return [*below, *tried, *above]


def collect_trials(found: Sequence[Measurement]) -> dict[str, list[Trial]]:
    """Return each method's trials by rate, averaged over seeds and attacks."""
    runs: dict[str, dict[float, list[Measurement]]] = {}
    for each in found:
        if each.setting == RATE:
            runs.setdefault(each.method, {}).setdefault(float(each.value), []).append(each)
    return {
        method: [_trial(multiple, each) for multiple, each in sorted(by_rate.items())]
        for method, by_rate in runs.items()
    }


def at_rate(cell: Cell, multiple: float) -> Cell:
    """Return the cell at a multiple of its learning rate."""
    return replace(cell, recipe=_at_rate(cell.recipe, multiple))


def tune_seeds(taken: Sequence[int], n: int = 2) -> tuple[int, ...]:
    """Return n seeds that the tables do not use."""
    free = [seed for seed in range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + n + len(taken)) if seed not in taken]
    return tuple(free[:n])


def _round(multiple: float) -> float:
    """Return a multiple as tables print it: a trial is found again by what its cell's name reads."""
    return float(f"{multiple:g}")


def _name_cell(cell: Cell, multiple: float) -> Cell:
    return replace(cell, setting=RATE, value=f"{multiple:g}")


def _at_rate(recipe: Recipe, multiple: float) -> Recipe:
    asked = recipe.hyperparameters.learning_rate_multiplier
    own = auto_multiplier(recipe) if asked == "auto" else asked
    return replace(recipe, hyperparameters=replace(recipe.hyperparameters, learning_rate_multiplier=own * multiple))


def _trial(multiple: float, found: Sequence[Measurement]) -> Trial:
    rows = [figures(each) for each in found]

    def mean(name: str, worst: float) -> float:
        return fmean(worst if row[name] is None else float(row[name] or 0.0) for row in rows)

    return Trial(multiple, mean("accuracy", 0.0), mean("asr", 1.0), mean("over_refusal", 1.0))


CURVES_HEADING = (
    "Every method at every learning rate, times the default; mean over the seeds +- standard deviation [95 % interval "
    "of the mean]"
)
SHOWN = ("asr", "over_refusal", "accuracy")


def curve_cells(source: Source, asked: TableChoices, multiples: Sequence[float]) -> list[Cell]:
    """Return the runs before any rate is added: the base models, and every method at every rate."""
    cells = method_cells(source, asked)
    trained = [at_rate(cell, multiple) for cell in cells if cell.method != BASE for multiple in multiples]
    return [cell for cell in cells if cell.method == BASE] + trained


def run_curves(
    place: Workplace, asked: TableChoices, multiples: Sequence[float], extend: int, on_found: OnFound
) -> list[Measurement]:
    """Run the base models, and every method at every rate, on every attack and seed."""
    cells = method_cells(place.source, asked)
    base = run_cells(place, [cell for cell in cells if cell.method == BASE], on_found)
    trained = [cell for cell in cells if cell.method != BASE]
    return base + over_rates(place, trained, multiples, extend, lambda found: on_found([*base, *found]))


def curves_table(found: Sequence[Measurement]) -> Table:
    """Return head and rows, sorted by rate within each method."""
    means = summaries(found)
    order = list(dict.fromkeys((each.attack, each.method) for each in found))
    rows = []
    for (method, _, attack, *_, value), row in means.items():
        cells = [spread(name, row[name]) if name in row else "-" for name in SHOWN]
        place = order.index((attack, method)), float(value or 0)
        rows.append((place, [attack, method, value or "-", *cells]))
    return ["attack", "method", "rate", *SHOWN], [row for _, row in sorted(rows, key=lambda each: each[0])]


def budget(found: Sequence[Measurement]) -> str:
    """Return a sentence with the number of rates that every method got."""
    rates = {method: [f"{each.multiple:g}" for each in trials] for method, trials in collect_trials(found).items()}
    (same,) = {tuple(each) for each in rates.values()} or {()}
    return f"Each of {len(rates)} methods was given the same {len(same)} rates: {', '.join(same)}."

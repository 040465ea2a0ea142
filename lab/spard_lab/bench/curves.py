"""Attack success against task accuracy over learning rates: a curve for each method, all with the same rates.

A single rate per method hides results at other rates, and choosing it is tuning. A curve shows all rates;
`spard_lab.bench.tune.over_rates` extends the grid for every method if a method's best rate is at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.cells import BASE, Asked, Cell, method_cells
from spard_lab.bench.measure import Measurement
from spard_lab.bench.report import Table, spread, summaries
from spard_lab.bench.source import Source
from spard_lab.bench.tune import OnFound, at_rate, collect_trials, over_rates

HEADING = (
    "Every method at every learning rate, times the default; mean over the seeds +- standard deviation [95 % interval "
    "of the mean]"
)
SHOWN = ("asr", "over_refusal", "accuracy")


def curve_cells(source: Source, asked: Asked, multiples: Sequence[float]) -> list[Cell]:
    """Return the runs before any rate is added: the base models, and every method at every rate."""
    cells = method_cells(source, asked)
    trained = [at_rate(cell, multiple) for cell in cells if cell.method != BASE for multiple in multiples]
    return [cell for cell in cells if cell.method == BASE] + trained


def run_curves(
    place: Workplace, asked: Asked, multiples: Sequence[float], extend: int, on_found: OnFound
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

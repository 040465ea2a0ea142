"""What a defense costs: the training time of each method against plain fine-tuning, side by side.

All methods train on the same rows from the same start, in one process and in rounds, so that a busy neighbor or a
warm machine meets all of them alike; every second round goes backward. A method's figure is the median over rounds of
its ratio to plain fine-tuning in the same round. On a CPU these are CPU seconds, on a GPU those of the clock, the
device waited for. Loading, selection and audit do not count; measuring tau does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from spard.config import resolve
from spard.models.base import load_base
from spard.research.bench.bench import Workplace
from spard.research.bench.cells import Asked, Cell, method_cells
from spard.research.bench.measure import Measurement, names_of, prepare, train_timed
from spard.research.bench.methods import changed
from spard.research.bench.report import Table

log = logging.getLogger(__name__)

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Cost:
    """A method's seconds as multiples of plain fine-tuning's, round by round."""

    method: str
    ratios: tuple[float, ...]
    median: float
    low: float
    high: float


def overhead(
    place: Workplace, asked: Asked, rounds: int, steps: int | None, on_found: Callable[[Sequence[Measurement]], None]
) -> list[Measurement]:
    """Time every method in every round, after one round that does not count; `steps` cuts the training short."""
    methods = (PLAIN, *(method for method in asked.methods if method != PLAIN))
    asked = replace(asked, methods=methods, attacks=asked.attacks[:1], seeds=asked.seeds[:1])
    cells = [_short(cell, steps) for cell in method_cells(place.source, asked) if cell.method in methods]
    inputs = place.inputs(asked.seeds[0])
    base = load_base(inputs.model, inputs.revision, inputs.device)
    prepared = {cell.method: prepare(base, cell, inputs, place.source.judge, place.folder) for cell in cells}
    found: list[Measurement] = []
    for number in range(rounds + 1):
        for cell in cells if number % 2 else reversed(cells):
            fresh = load_base(inputs.model, inputs.revision, inputs.device)
            one = prepared[cell.method]
            timed = train_timed(replace(one, context=replace(one.context, base=fresh)))
            log.info("round %d of %d, %s: %.2f CPU s, %.2f s", number, rounds, cell.method, timed.cpu_s, timed.wall_s)
            if number:
                names = names_of(replace(cell, setting="round", value=str(number)), inputs)
                rows = len(one.rows.task)
                found.append(Measurement(**names, results=(), rows=rows, train_s=timed.wall_s, cpu_s=timed.cpu_s))
        if number:
            on_found(found)
    return found


def costs(found: Sequence[Measurement], *, by_clock: bool) -> list[Cost]:
    """Ratios to plain fine-tuning, in CPU seconds or by the clock."""
    seconds = {(each.method, each.value): (each.train_s if by_clock else each.cpu_s) or 0.0 for each in found}
    rounds = list(dict.fromkeys(each.value for each in found))
    methods = dict.fromkeys(each.method for each in found)
    ratios = {name: tuple(seconds[name, value] / seconds[PLAIN, value] for value in rounds) for name in methods}
    return [Cost(name, each, median(each), min(each), max(each)) for name, each in ratios.items()]


def costs_table(found: Sequence[Cost]) -> Table:
    """Head and rows."""
    head = ["method", "times plain fine-tuning", "lowest round", "highest round", "rounds"]
    cells = [[f"{each.median:.2f}", f"{each.low:.2f}", f"{each.high:.2f}", str(len(each.ratios))] for each in found]
    return head, [[each.method, *row] for each, row in zip(found, cells, strict=True)]


def _short(cell: Cell, steps: int | None) -> Cell:
    """Return the cell for the rows of so many steps, each seen once, with as large a share of safe rows."""
    if steps is None:
        return cell
    recipe = changed(changed(cell.recipe, "epochs", "1"), "ratio", str(cell.recipe.selection.ratio))
    return replace(cell, recipe=recipe, n=steps * resolve(recipe, 2**31, 1).batch_size)

"""The kinds of tables: each function runs the cells of its kind and writes the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from spard.errors import InvalidRecipe
from spard.models.base import load_base
from spard.replacement import write_atomically
from spard_lab.bench import figures
from spard_lab.bench.bench import Workplace, run_cells
from spard_lab.bench.card import card_cells, card_inputs, card_lines, card_table, lines_table, verdicts
from spard_lab.bench.cells import Cell, TableChoices, method_cells, selection_cells, sweep_cells
from spard_lab.bench.differences import METHODS_HEADING, SELECTIONS_HEADING, methods_table, paired_table
from spard_lab.bench.lab import LabSource
from spard_lab.bench.maps import distributions, level_cells, maps, with_levels
from spard_lab.bench.measure import Measurement
from spard_lab.bench.overhead import Extent, costs, costs_table, overhead
from spard_lab.bench.parts import PARTS_HEADING, arms_table, compared_methods, comparisons, parts_table
from spard_lab.bench.report import Table, make_tables, results_csv, results_json, runs_table, write_page
from spard_lab.bench.row_signals import (
    TOLD_HEADING,
    TRAINED_HEADING,
    RowActionRun,
    SignalQuality,
    facts,
    measure_disguises,
    told_table,
    train_signal_runs,
    trained_table,
)
from spard_lab.bench.source import Inputs, Source, Split
from spard_lab.bench.tune import CURVES_HEADING, EXTEND, at_rate, budget, curves_table, run_curves


@dataclass(frozen=True, slots=True)
class Order:
    """A request for a table.

    Learning rates are multiples of the default: `multiples` by method; `rates` are those of curves, which may be
    extended `extend` times.
    """

    kind: str
    recipe: str
    source: Source
    folder: Path
    split: Split
    asked: TableChoices
    multiples: Mapping[str, float] = field(default_factory=dict)
    levels: int = 5
    extent: Extent = field(default_factory=Extent)
    rates: tuple[float, ...] = ()
    extend: int = EXTEND

    @property
    def title(self) -> str:
        """The heading of the table's Markdown."""
        return f"spard bench {self.kind}: {self.recipe}, {self.split} split"

    @property
    def facts(self) -> str:
        """The sentences under the title: seeds, and learning rates that are not the default."""
        seeds = ", ".join(map(str, self.asked.seeds))
        rates = ", ".join(f"{name} {multiple:g}" for name, multiple in self.multiples.items())
        return f"Seeds: {seeds}.{f' Learning rates, times the default: {rates}.' if rates else ''}"


def methods(order: Order) -> str:
    """Compare the methods in a table, and each with the reference prompt by prompt; return the Markdown."""
    place = Workplace(order.source, order.folder, order.split)
    found = run_cells(place, _at_rates(order, method_cells(order.source, order.asked)), partial(_keep, order))
    tables = make_tables(found) | {METHODS_HEADING: methods_table(found)}
    return _finish(order, found, tables, figures.of_methods(found), {})


def parts(order: Order) -> str:
    """Measure what each part of the defense contributes, beside named methods; return the Markdown."""
    questions = comparisons(order.asked.parts)
    place = Workplace(order.source, order.folder, order.split)
    cells = parts_cells(order.source, order.asked)
    found = run_cells(place, _at_rates(order, cells), partial(_keep, order))
    tables = {PARTS_HEADING: parts_table(found, questions), "The two methods of each question": arms_table(questions)}
    return _finish(order, found, tables | make_tables(found), figures.of_methods(found), {})


def parts_cells(source: Source, asked: TableChoices) -> list[Cell]:
    """Return the runs of the table of parts: its arms, and the named methods."""
    arms = compared_methods(comparisons(asked.parts))
    return method_cells(source, replace(asked, methods=tuple(dict.fromkeys([*arms, *asked.methods]))))


def curves(order: Order) -> str:
    """Plot attack success against the task over learning rates, equally many for every method; return the Markdown."""
    place = Workplace(order.source, order.folder, order.split)
    found = run_curves(place, order.asked, order.rates, order.extend, partial(_keep, order))
    tables = {f"{CURVES_HEADING}. {budget(found)}": curves_table(found)}
    return _finish(order, found, tables | make_tables(found), figures.of_curves(found), {})


def selection(order: Order) -> str:
    """Compare the selections in a table, and the first with the others by seed; return the Markdown."""
    place = Workplace(order.source, order.folder, order.split)
    cells = selection_cells(order.source, order.asked)
    found = run_cells(place, _at_rates(order, cells), partial(_keep, order))
    return _finish(
        order, found, {SELECTIONS_HEADING: paired_table(found)} | make_tables(found), figures.of_selection(found), {}
    )


def sweep(order: Order) -> str:
    """Run settings at each of their values, and plot the figures against them; return the Markdown."""
    return _table(order, sweep_cells(order.source, order.asked), figures.of_sweep)


def similarity(order: Order) -> str:
    """Run on the pool's levels, and plot the distribution of q in every pool; return the Markdown."""
    place = Workplace(order.source, order.folder, order.split, partial(_with_level_attacks, order))
    cells = level_cells(order.source, order.asked, order.levels)
    found = run_cells(place, _at_rates(order, cells), partial(_keep, order))
    spread = distributions(place, order.asked)
    drawn = figures.of_similarity(found, spread)
    return _finish(order, found, make_tables(found), drawn, {"q": spread})


def cost(order: Order) -> str:
    """Measure training time by method, on a GPU by the clock; return the Markdown."""
    place = Workplace(order.source, order.folder, order.split)
    inputs = place.inputs(order.asked.seeds[0])
    by_clock = load_base(inputs.model, inputs.revision, inputs.device).device.type == "cuda"
    found = overhead(place, order.asked, order.extent, partial(_keep, order))
    times = costs(found, by_clock=by_clock)
    unit = "seconds of the clock" if by_clock else "CPU seconds"
    tables = {f"Training in {unit}, median over rounds": costs_table(times)}
    return _finish(order, found, tables, figures.of_overhead(times), {"overhead": [asdict(each) for each in times]})


def embeddings_map(order: Order) -> str:
    """Plot the embeddings in a plane; without runs, results.csv has only its header."""
    found = maps(Workplace(order.source, order.folder, order.split), order.asked)
    counts = [
        [each.projection, str(len(each.pool)), str(len(each.task)), str(len(each.harmful)), str(len(places)), method]
        for each in found
        for method, places in each.chosen.items()
    ]
    head = ("projection", "pool rows", "task rows", "harmful rows", "chosen", "by")
    facts = {"maps": [asdict(each) for each in found]}
    return _finish(order, [], {"What the maps show": (head, counts)}, figures.of_maps(found), facts)


def row_signals(order: Order) -> str:
    """Measure signals that separate harmful rows from innocent ones, and train with flagged rows kept and dropped."""
    source = _small_labs(order)
    told: list[SignalQuality] = []
    runs: list[RowActionRun] = []
    for seed in order.asked.seeds:
        lab = source.make_lab(seed)
        told += measure_disguises(lab, order.split)
        runs += train_signal_runs(lab, order.split, source.recipe, order.folder)
    tables = {TOLD_HEADING: told_table(told), TRAINED_HEADING: trained_table(runs)}
    return _finish(order, [], tables, {}, facts(told, runs))


def card(order: Order) -> str:
    """Measure the default, its placebos and no defense, and write the acceptance card; return the Markdown."""
    source = _small_labs(order)

    def extend(inputs: Inputs, seed: int) -> Inputs:
        return card_inputs(source.make_lab(seed), order.asked, inputs, seed, order.split, order.folder)

    cells = card_cells(source, order.asked)
    place = Workplace(source, order.folder, order.split, extend)
    found = run_cells(place, _at_rates(order, cells), partial(_keep, order))
    lines = card_lines(found)
    tables = {
        "The card": card_table(lines),
        "Its comparisons, in percent and points +- two standard errors, seeds [95 % interval of the mean]": lines_table(
            lines
        ),
        "Every run [95 % Wilson interval of its prompts]": runs_table(found),
    }
    facts = {"card": verdicts(lines), "comparisons": [asdict(each) | {"verdict": each.verdict} for each in lines]}
    return _finish(order, found, tables, {}, facts)


KINDS: dict[str, Callable[[Order], str]] = {
    "methods": methods,
    "parts": parts,
    "curves": curves,
    "selection": selection,
    "sweep": sweep,
    "overhead": cost,
    "similarity": similarity,
    "map": embeddings_map,
    "rows": row_signals,
    "card": card,
}


CELLS: dict[str, Callable[[Source, TableChoices, int], list[Cell]]] = {  # for kinds that train a model per cell
    "methods": lambda source, asked, levels: method_cells(source, asked),
    "parts": lambda source, asked, levels: parts_cells(source, asked),
    "selection": lambda source, asked, levels: selection_cells(source, asked),
    "sweep": lambda source, asked, levels: sweep_cells(source, asked),
    "similarity": level_cells,
}


def _small_labs(order: Order) -> LabSource:
    """Return the small labs; raise `InvalidRecipe` for another source."""
    if not isinstance(order.source, LabSource) or order.source.spec.natural:
        raise InvalidRecipe(f"the kind {order.kind} needs the small lab's words: take --recipe lab", "recipe")
    return order.source


def _table(order: Order, cells: Sequence[Cell], draw: Callable[[Sequence[Measurement]], dict[str, str]]) -> str:
    place = Workplace(order.source, order.folder, order.split)
    found = run_cells(place, _at_rates(order, cells), partial(_keep, order))
    return _finish(order, found, make_tables(found), draw(found), {})


def _at_rates(order: Order, cells: Sequence[Cell]) -> list[Cell]:
    return [at_rate(cell, order.multiples.get(cell.method, 1.0)) for cell in cells]


def _with_level_attacks(order: Order, inputs: Inputs, seed: int) -> Inputs:
    return with_levels(inputs, order.asked, seed, order.levels, order.folder)


def _keep(order: Order, found: Sequence[Measurement], facts: Mapping[str, Any] | None = None) -> None:
    """Write the measurements so far to results.csv and results.json."""
    asked = {"kind": order.kind, "recipe": order.recipe, "split": order.split, "learning_rates": order.multiples}
    write_atomically(order.folder / "results.csv", results_csv(found))
    report = results_json(found, asked | dict(facts or {}))
    write_atomically(order.folder / "results.json", json.dumps(report, indent=1) + "\n")


def _finish(
    order: Order,
    found: Sequence[Measurement],
    tables: Mapping[str, Table],
    drawn: Mapping[str, str],
    facts: Mapping[str, Any],
) -> str:
    """Write all files and return the Markdown."""
    _keep(order, found, facts)
    return write_page(order.folder, order.kind, order.title, order.facts, drawn, tables)

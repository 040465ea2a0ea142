"""The runs of a table as data: each cell is one model to train and measure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from spard.config import Recipe, RowSignal
from spard.config.extensions import SELECTIONS
from spard.errors import InvalidRecipe
from spard_lab.attacks.rows import Row, add_harmful, share_harmful, shuffle_rows
from spard_lab.bench.methods import change_setting, has_setting, method_recipe, row_signal_settings, with_selection
from spard_lab.bench.source import Inputs, Source

log = logging.getLogger(__name__)

BASE = "base"
SELECTION_NAMES = SELECTIONS.names()
HARMFUL_RATIO, FILE_SIZE = "harmful_ratio", "n"
SWEPT = {  # the paper's four sweeps, p, tau, beta and eta_safe; eta_safe is in the units of the variant
    "ratio": ("0.005", "0.01", "0.03", "0.05", "0.1"),
    "tau": ("0.05", "0.1", "0.2", "0.5", "auto"),
    "beta": ("0", "1", "2", "4", "8"),
    "eta_safe": ("0.25", "0.5", "1", "2", "4"),
}

_PAPER: tuple[tuple[str, tuple[str, ...]], ...] = tuple(SWEPT.items())


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a method on an attack with its whole recipe.

    setting, value  the setting that a sweep changed, and its value
    harmful_ratio   harmful rows per task row; None: the attack's own file, or the ratio of it if `n` is given
    n               rows of the training file; None: all
    row_signal      treatment of rows that the base model would refuse
    """

    method: str
    attack: str
    seed: int
    recipe: Recipe
    pool: str = ""
    setting: str = ""
    value: str = ""
    harmful_ratio: float | None = None
    n: int | None = None
    row_signal: RowSignal = field(default_factory=RowSignal)


@dataclass(frozen=True, slots=True)
class TableChoices:
    """The command line's choices for a kind of table."""

    methods: tuple[str, ...]
    attacks: tuple[str, ...]
    pools: tuple[str, ...]
    seeds: tuple[int, ...]
    selections: tuple[str, ...] = SELECTION_NAMES
    over: tuple[tuple[str, tuple[str, ...]], ...] = ()
    parts: tuple[str, ...] = ()


def method_cells(source: Source, asked: TableChoices) -> list[Cell]:
    """Return methods on attacks over seeds, the base model first: the paper's main table."""
    cells = []
    for seed in asked.seeds:
        methods = list(_methods(source, asked, asked.attacks[0], seed))
        for attack in asked.attacks:
            cells += [base_cell(source, attack, seed), *(replace(each, attack=attack) for each in methods)]
    return cells


def selection_cells(source: Source, asked: TableChoices) -> list[Cell]:
    """Return every selection under each method that uses one, on each pool; the base model first."""
    return [
        cell
        for seed in asked.seeds
        for attack in asked.attacks
        for cell in [base_cell(source, attack, seed), *_selections(source, asked, attack, seed)]
    ]


def sweep_cells(source: Source, asked: TableChoices) -> list[Cell]:
    """Return one setting at a time over its values, the base model first; methods without the setting are left out.

    Settings without values take those of `SWEPT`; without any setting, all of `SWEPT` is run.
    """
    asked = replace(asked, over=tuple((name, values or _usual(name)) for name, values in asked.over or _PAPER))
    return [
        cell
        for seed in asked.seeds
        for attack in asked.attacks
        for cell in [base_cell(source, attack, seed), *_sweeps(source, asked, attack, seed)]
    ]


def base_cell(source: Source, attack: str, seed: int) -> Cell:
    """Return the cell of the base model, without training."""
    return Cell(BASE, attack, seed, replace(source.recipe, seed=seed))


def training_rows(cell: Cell, inputs: Inputs) -> Sequence[Row]:
    """Return the training file of a cell.

    With a harmful ratio: the task rows and `ratio` times as many harmful ones; fewer task rows if harmful ones run out.
    With n: a file of n rows with the same share of harmful ones.
    """
    attack = inputs.attacks[cell.attack]
    if cell.harmful_ratio is None and cell.n is None:
        return attack.rows
    own = max(0.0, len(attack.rows) / len(inputs.task) - 1)
    ratio = own if cell.harmful_ratio is None else cell.harmful_ratio
    if cell.n is not None:
        return share_harmful(inputs.task, attack.harmful, cell.n, ratio / (1 + ratio), cell.seed)
    most = min(len(inputs.task), int(len(attack.harmful) / ratio)) if ratio else len(inputs.task)
    return add_harmful(shuffle_rows(inputs.task, cell.seed, "kept")[:most], attack.harmful, ratio, cell.seed)


def _methods(source: Source, asked: TableChoices, attack: str, seed: int) -> Iterator[Cell]:
    for method in asked.methods:
        recipe = method_recipe(method, replace(source.recipe, seed=seed), source.defenses(seed))
        if missing := recipe.defense.missing_model:
            what = recipe.defense.models[missing]
            log.warning("%s is left out: the recipe names no %s, %s", method, missing, what)
            continue
        signal = RowSignal(**row_signal_settings(method))
        pool = asked.pools[0] if recipe.uses_pool or signal.action != "off" else ""
        yield Cell(method, attack, seed, recipe, pool, row_signal=signal)


def _selections(source: Source, asked: TableChoices, attack: str, seed: int) -> Iterator[Cell]:
    for pool in asked.pools:
        for cell in _methods(source, asked, attack, seed):
            if cell.recipe.uses_pool:
                for selection in asked.selections:
                    yield replace(cell, recipe=with_selection(cell.recipe, selection), pool=pool)


def _sweeps(source: Source, asked: TableChoices, attack: str, seed: int) -> Iterator[Cell]:
    for setting, values in asked.over:
        for cell in _methods(source, asked, attack, seed):
            yield from _sweep_cells(cell, setting, values)


def _sweep_cells(cell: Cell, setting: str, values: Sequence[str]) -> Iterator[Cell]:
    for value in values:
        named = replace(cell, setting=setting, value=value)
        if setting == HARMFUL_RATIO:
            yield replace(named, harmful_ratio=_number(setting, value))
        elif setting == FILE_SIZE:
            yield replace(named, n=int(_number(setting, value)))
        elif has_setting(cell.recipe, setting):
            yield replace(named, recipe=change_setting(cell.recipe, setting, value))
        else:
            log.warning("%s is left out of the sweep over %s, which it does not have", cell.method, setting)
            return


def _usual(setting: str) -> tuple[str, ...]:
    if setting not in SWEPT:
        raise InvalidRecipe(
            f"--over {setting}: name its values, {setting}=VALUE,...; of {', '.join(SWEPT)} they are known"
        )
    return SWEPT[setting]


def _number(setting: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if number < 0:
        raise InvalidRecipe(f"{setting}: {value!r} is not a number from 0 on", setting)
    return number

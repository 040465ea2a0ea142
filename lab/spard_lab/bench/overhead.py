"""The cost of a defense: the training time of each method, compared with plain fine-tuning.

All methods train on the same rows from the same start, in one process and in rounds, so that other load and a warm
machine affect them alike; every second round runs in reverse order. A method's figure is the median over rounds of its
ratio to plain fine-tuning in the same round, at the same batch size and length of the pool's prompts, if these vary. On
a CPU the times are CPU seconds, on a GPU seconds by the clock after synchronization. Loading, selection and audit do
not count; measuring tau does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from spard.config import resolve
from spard.data.chat import render_question
from spard.data.jsonl import file_chunks, numbered_rows
from spard.models.base import load_base
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import Cell, TableChoices, method_cells
from spard_lab.bench.measure import Measurement, prepare, run_names, train_timed, training_file
from spard_lab.bench.methods import change_setting
from spard_lab.bench.report import Table
from spard_lab.bench.source import Inputs

# Pools with prompts of a given number of tokens, to measure the cost of their length.

_FILLER = " and"
_PROBE = 64  # filler words, for measuring the tokens of one


def with_prompts(inputs: Inputs, pool: str, tokenizer: Any, tokens: int, folder: Path) -> Inputs:
    """Return the inputs with a pool's prompts lengthened to about `tokens` tokens in the chat template.

    Longer prompts stay as they are. The file is written below `folder`.
    """

    def length(text: str) -> int:
        return len(render_question(tokenizer, text))

    def lengthen(text: str) -> str:
        missing = tokens - length(text)
        each = (length(text + _FILLER * _PROBE) - length(text)) / _PROBE
        return text + _FILLER * max(0, round(missing / each))

    rows = [row | {"prompt": lengthen(row["prompt"])} for _, row in numbered_rows(file_chunks(inputs.pools[pool]))]
    return replace(inputs, pools={**inputs.pools, pool: training_file(rows, folder / "pools")})


log = logging.getLogger(__name__)

PLAIN = "none"
_ROUND = "round"  # last word of a measurement's setting, after batch size and prompt length


@dataclass(frozen=True, slots=True)
class Cost:
    """A method's seconds as multiples of plain fine-tuning's, round by round.

    `place` is the batch size and prompt length as text.
    """

    place: str
    method: str
    ratios: tuple[float, ...]
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of the timing: rounds, steps of each training if shortened, batch sizes and tokens of pool prompts."""

    rounds: int = 5
    steps: int | None = None
    batch_sizes: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()


def overhead(
    place: Workplace, asked: TableChoices, extent: Extent, on_found: Callable[[Sequence[Measurement]], None]
) -> list[Measurement]:
    """Time every method at every batch size and prompt length in every round, after one uncounted round."""
    methods = (PLAIN, *(method for method in asked.methods if method != PLAIN))
    asked = replace(asked, methods=methods, attacks=asked.attacks[:1], seeds=asked.seeds[:1])
    inputs = place.inputs(asked.seeds[0])
    base = load_base(inputs.model, inputs.revision, inputs.device)
    cells = list(_place_cells(place, asked, extent, methods))
    prepared = {}
    for cell, tokens in cells:
        own = with_prompts(inputs, asked.pools[0], base.tokenizer, tokens, place.folder) if tokens else inputs
        prepared[cell.setting, cell.method] = prepare(base, cell, own, place.source.judge, place.folder)
    found: list[Measurement] = []
    rounds = extent.rounds
    for number in range(rounds + 1):
        for cell, _ in cells if number % 2 else reversed(cells):
            fresh = load_base(inputs.model, inputs.revision, inputs.device)
            one = prepared[cell.setting, cell.method]
            timed = train_timed(replace(one, context=replace(one.context, base=fresh)))
            log.info("round %d of %d, %s: %.2f CPU s, %.2f s", number, rounds, cell.method, timed.cpu_s, timed.wall_s)
            if number:
                names = run_names(replace(cell, value=str(number)), inputs)
                rows = len(one.rows.task)
                found.append(Measurement(**names, results=(), rows=rows, train_s=timed.wall_s, cpu_s=timed.cpu_s))
        if number:
            on_found(found)
    return found


def costs(found: Sequence[Measurement], *, by_clock: bool) -> list[Cost]:
    """Return the ratios to plain fine-tuning, in CPU seconds or by the clock."""
    seconds = {
        (each.setting, each.method, each.value): (each.train_s if by_clock else each.cpu_s) or 0.0 for each in found
    }
    rounds = list(dict.fromkeys(each.value for each in found))
    lines = dict.fromkeys((each.setting, each.method) for each in found)
    costs = []
    for place, name in lines:
        ratios = tuple(seconds[place, name, value] / seconds[place, PLAIN, value] for value in rounds)
        where = place.removesuffix(_ROUND).rstrip(", ")
        costs.append(Cost(where, name, ratios, median(ratios), min(ratios), max(ratios)))
    return costs


def costs_table(found: Sequence[Cost]) -> Table:
    """Return head and rows."""
    head = ["method", "times plain fine-tuning", "lowest round", "highest round", "rounds"]
    cells = [[f"{each.median:.2f}", f"{each.low:.2f}", f"{each.high:.2f}", str(len(each.ratios))] for each in found]
    rows = [[each.method, *row] for each, row in zip(found, cells, strict=True)]
    if not any(each.place for each in found):
        return head, rows
    return ["place", *head], [[each.place, *row] for each, row in zip(found, rows, strict=True)]


def _place_cells(
    place: Workplace, asked: TableChoices, extent: Extent, methods: Sequence[str]
) -> Iterator[tuple[Cell, int | None]]:
    """Yield the cells of every batch size and prompt length, each with its number of prompt tokens.

    None in place of a number leaves the prompts unchanged.
    """
    for size, tokens in product(extent.batch_sizes or (None,), extent.prompt_tokens or (None,)):
        parts = [f"batch {size}"] if size else []
        parts += [f"prompts of {tokens} tokens"] if tokens else []
        for cell in method_cells(place.source, asked):
            if cell.method in methods:
                sized = replace(cell, recipe=change_setting(cell.recipe, "batch_size", str(size))) if size else cell
                yield replace(_short(sized, extent.steps), setting=", ".join([*parts, _ROUND])), tokens


def _short(cell: Cell, steps: int | None) -> Cell:
    """Return the cell shortened to `steps` steps on different rows, with the same ratio of safe rows."""
    if steps is None:
        return cell
    recipe = change_setting(change_setting(cell.recipe, "epochs", "1"), "ratio", str(cell.recipe.selection.ratio))
    return replace(cell, recipe=recipe, n=steps * resolve(recipe, 2**31, 1).batch_size)

"""Estimate the hours of a table before it starts, from a few steps of the actual model on this machine.

Every kind of training in the table (a method at a batch size) takes one uncounted step and `STEPS` counted ones on the
first rows of its own file; `STEPS` is a multiple of four, because defenses evaluate the safe loss at intervals. After
`TIMING_S` seconds of this, further methods take the step of the first timed method with their defense (`~`). The base
model answers the first prompts of each suite, with the run's limit of new tokens. The time of a run is

    load + embed * (rows + pool) + signal + step * steps + the sum over suites of reply * prompts

in seconds: `load` loads the model, `embed` embeds one row (for methods that select safe rows), `step` is the mean of
the steps above, `reply` one prompt's share of its batch. `signal` is for methods with the row signal: its time on the
few rows above, with `embed` once more for every row. The base model's own run is loading and replies. Stored runs cost
nothing, and an audit of the base model counts once.

A small lab that is not made yet is not made for an estimate: all is timed on a model of its shape with random weights.

The estimate does not include a judge that is slower than the model, labs that are not made yet, replies that become
longer by training, and the few additional steps of methods that mix safe rows into the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from spard.config import Defense, RowSignal, resolve
from spard.data.jsonl import file_chunks, numbered_rows
from spard.data.rows import Prompt
from spard.evaluation.ask import ask, in_memory
from spard.evaluation.audit import Suite
from spard.models.base import Base, load_base
from spard.pipeline import train
from spard.pipeline.messages import Message, Reporter
from spard.selection.embeddings import embed
from spard_lab.attacks.rows import last_answer
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import BASE, Cell, training_rows
from spard_lab.bench.measure import prepare, read_run, run_key, training_file
from spard_lab.bench.methods import change_setting
from spard_lab.bench.report import Table
from spard_lab.bench.source import Inputs

STEPS = 8
POOL = 128  # rows of the pool that a timed training selects from
EMBEDDED = 32  # rows
FEW, BATCH = 8, 64  # timed prompts of a suite; a whole batch on a GPU, or if the few take less than `QUICK_S`
QUICK_S = 5.0
TIMING_S = 3.0
T = TypeVar("T")


@dataclass(slots=True)
class Hours:
    """The time of a method's runs; `done` runs are stored already and take none.

    is_timed  its steps were timed, not those of another method with its defense
    """

    method: str
    step_s: float = 0.0
    is_timed: bool = True
    runs: int = 0
    done: int = 0
    steps: int = 0
    prompts: int = 0
    train_h: float = 0.0
    audit_h: float = 0.0


@dataclass(slots=True)
class Clock:
    """Times the parts of runs with one base model, each part once."""

    base: Base
    load_s: float
    place: Workplace
    _embed_s: float | None = None
    _signal_s: float | None = None
    _steps: dict[tuple[str, int], float] = field(default_factory=dict)
    _defense_steps: dict[type[Defense], float] = field(default_factory=dict)  # of the first timed method of each
    _timing_s: float = 0.0
    _replies: dict[tuple[str, int], float] = field(default_factory=dict)
    _answer_tokens: dict[str, int] = field(default_factory=dict)  # of the longest answer, by attack

    def embed(self, cell: Cell, inputs: Inputs) -> float:
        """Return the seconds of embedding one row of the pool."""
        if self._embed_s is None:
            texts = [row["prompt"] for _, row in islice(numbered_rows(file_chunks(_pool(cell, inputs))), EMBEDDED)]
            self._embed_s = _time(lambda: embed(self.base, texts)) / len(texts)
        return self._embed_s

    def signal(self, cell: Cell, inputs: Inputs) -> float:
        """Return the seconds that the row signal adds to the set-up of a few rows, mostly for the own refusals."""
        if self._signal_s is None:
            short, few = _shorten_cell(cell, inputs, self.place.folder)
            took = [
                _time(partial(prepare, self.base, each, few, self.place.source.judge, self.place.folder))
                for each in (short, replace(short, row_signal=RowSignal()))
            ]
            self._signal_s = max(0.0, took[0] - took[1])
        return self._signal_s

    def step(self, cell: Cell, inputs: Inputs) -> float:
        """Return the mean seconds of a step of the cell's method at its batch size."""
        if not self.is_timed(cell, inputs):
            return self._defense_steps[type(cell.recipe.defense)]
        key = cell.method, _numbers(cell, inputs)[0]
        if key not in self._steps:
            started = time.perf_counter()
            self._steps[key] = _step_s(*_shorten_cell(cell, inputs, self.place.folder), self.place)
            self._timing_s += time.perf_counter() - started
            self._defense_steps.setdefault(type(cell.recipe.defense), self._steps[key])
        return self._steps[key]

    def is_timed(self, cell: Cell, inputs: Inputs) -> bool:
        """Say whether the cell's own steps are timed, or were."""
        is_new = (cell.method, _numbers(cell, inputs)[0]) not in self._steps
        return not (is_new and self._timing_s >= TIMING_S and type(cell.recipe.defense) in self._defense_steps)

    def reply(self, suite: Suite, cell: Cell, inputs: Inputs) -> float:
        """Return the seconds of one prompt of a suite; attacks that ask the same prompts share them.

        A model with random weights does not end its replies, so it writes as many tokens as the longest trained answer.
        """
        limit = self._reply_limit(cell, inputs)
        key = repr(suite.prompts[:BATCH]), limit
        if key not in self._replies:
            self._replies[key] = reply_seconds(self.base, suite.prompts, limit)
        return self._replies[key]

    def _reply_limit(self, cell: Cell, inputs: Inputs) -> int:
        """Return the most tokens of a reply."""
        limit = cell.recipe.audit.max_new_tokens
        if inputs.is_trained:
            return limit
        if cell.attack not in self._answer_tokens:
            answers = [last_answer(row) for row in inputs.attacks[cell.attack].rows]
            self._answer_tokens[cell.attack] = max(map(len, self.base.tokenizer(answers)["input_ids"]))
        return min(limit, self._answer_tokens[cell.attack] + 1)


def reply_seconds(base: Base, prompts: Sequence[Prompt], limit: int) -> float:
    """Return the seconds of one prompt's reply of at most `limit` tokens, from the first few prompts or a batch."""
    speaker = in_memory(base.model, base.tokenizer)
    n = BATCH if base.device.type == "cuda" else FEW
    seconds = _time(lambda: ask(speaker, prompts[:n], limit))
    if n < BATCH and seconds < QUICK_S:
        seconds = _time(lambda: ask(speaker, prompts[:BATCH], limit))
        n = BATCH
    return seconds / min(n, len(prompts))


def estimate(place: Workplace, cells: Sequence[Cell]) -> list[Hours]:
    """Return the estimated hours of the cells by method; the inputs are made and files written as for the runs."""
    inputs = place.inputs(cells[0].seed)
    load_base(inputs.model, inputs.revision, inputs.device)  # fills the page cache: runs load from memory
    started = time.perf_counter()
    base = load_base(inputs.model, inputs.revision, inputs.device)
    clock = Clock(base, time.perf_counter() - started, place)
    found: dict[str, Hours] = {}
    audited = set[str]()
    has_runs = (place.folder / "runs").exists()
    for cell in cells:
        hours = found.setdefault(cell.method, Hours(cell.method))
        inputs = place.inputs(cell.seed)
        is_looked_for = (has_runs or cell.method == BASE) and (not cell.pool or cell.pool in inputs.pools)
        key = run_key(cell, inputs, place.source.judge) if is_looked_for else ""
        is_done = key in audited or (key != "" and read_run(place.folder, key) is not None)
        hours.runs, hours.done = hours.runs + 1, hours.done + is_done
        if not is_done:
            add_run(hours, clock, cell, inputs)
        if cell.method == BASE:
            audited.add(key)
    return list(found.values())


def hours_table(found: Sequence[Hours]) -> Table:
    """Return head and rows, the sum last."""
    head = ["method", "runs", "done", "steps", "s a step", "prompts", "training, h", "audits, h", "together, h"]
    rows = [
        [
            each.method,
            *map(str, (each.runs, each.done, each.steps)),
            f"{'' if each.is_timed else '~'}{each.step_s:.3g}" if each.steps else "-",
            str(each.prompts),
            *(f"{hours:.2f}" for hours in (each.train_h, each.audit_h, each.train_h + each.audit_h)),
        ]
        for each in found
    ]
    sums = [sum(each.train_h for each in found), sum(each.audit_h for each in found)]
    counts = [sum(each.runs for each in found), sum(each.done for each in found)]
    hours = (f"{each:.2f}" for each in (*sums, sum(sums)))
    return head, [*rows, ["all", *map(str, counts), "", "", "", *hours]]


def add_run(hours: Hours, clock: Clock, cell: Cell, inputs: Inputs) -> None:
    """Add one run's steps, prompts and hours to `hours`."""
    train_s, audit_s = clock.load_s, 0.0
    if cell.method != BASE:
        _, steps, rows = _numbers(cell, inputs)
        hours.is_timed = clock.is_timed(cell, inputs)
        hours.step_s = clock.step(cell, inputs)
        hours.steps += steps
        train_s += steps * hours.step_s
        if cell.pool:
            pool = sum(1 for _ in numbered_rows(file_chunks(_pool(cell, inputs))))
            passes = cell.recipe.uses_pool + (cell.row_signal.action != "off")
            train_s += clock.embed(cell, inputs) * (rows + pool) * passes
        if cell.row_signal.action != "off":
            train_s += clock.signal(cell, inputs)
    for suite in inputs.attacks[cell.attack].suites:
        asked = min(len(suite.prompts), cell.recipe.audit.max_prompts)
        hours.prompts += asked
        audit_s += asked * clock.reply(suite, cell, inputs) if asked else 0.0
    hours.train_h += train_s / 3600
    hours.audit_h += audit_s / 3600


def _numbers(cell: Cell, inputs: Inputs) -> tuple[int, int, int]:
    """Return batch size, number of steps and number of rows of a cell's training."""
    rows = len(training_rows(cell, inputs))
    resolved = resolve(cell.recipe, rows, hidden_size=1)  # the width only affects the learning rate
    return resolved.batch_size, resolved.n_epochs * math.ceil(rows / resolved.batch_size), rows


def _shorten_cell(cell: Cell, inputs: Inputs, folder: Path) -> tuple[Cell, Inputs]:
    """Return a training of at most `STEPS` + 1 steps, on the first rows of the file and of the pool."""
    attack, batch = inputs.attacks[cell.attack], _numbers(cell, inputs)[0]
    rows = training_rows(cell, inputs)[: (STEPS + 1) * batch]
    few = replace(attack, rows=rows, pool=attack.pool and attack.pool[:POOL], jobs=1)
    pools = {}
    if cell.pool:
        own = [row for _, row in islice(numbered_rows(file_chunks(_pool(cell, inputs))), POOL)]
        pools[cell.pool] = training_file(own, folder / "files")
    recipe = change_setting(change_setting(cell.recipe, "batch_size", str(batch)), "epochs", "1")
    short = replace(cell, recipe=recipe, n=None, harmful_ratio=None)
    return short, replace(inputs, attacks={cell.attack: few}, pools=pools)


def _step_s(cell: Cell, inputs: Inputs, place: Workplace) -> float:
    """Train for a few steps and return the mean of the seconds between them."""
    base = load_base(inputs.model, inputs.revision, inputs.device)
    prepared = prepare(base, cell, inputs, place.source.judge, place.folder)
    times: list[float] = []

    def look(message: Message) -> None:
        if message["kind"] == "metrics":  # the loss has been read, so the device has finished the step
            times.append(time.perf_counter())

    tuned = train.run(replace(prepared.context, report=Reporter(look)), prepared.rows)
    apart = [later - earlier for earlier, later in pairwise(times)]
    return fmean(apart) if apart else tuned.trained.seconds


def _pool(cell: Cell, inputs: Inputs) -> Path:
    """Return the pool of a cell, or the first whole pool if the cell's level is not cut out yet."""
    return inputs.pools.get(cell.pool) or next(iter(inputs.pools.values()))


def _time(do: Callable[[], T]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started

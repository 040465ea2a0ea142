"""The work of `spard bench KIND --recipe lab|FILE.yaml --out DIR`: the paper's tables and figures."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers.utils.logging import disable_progress_bar

from spard.commands import exits
from spard.commands.front import Asked as Given
from spard.commands.front import alone
from spard.errors import InvalidRecipe, SpardError
from spard_lab import commands
from spard_lab.bench.bench import Workplace
from spard_lab.bench.cells import SELECTION_NAMES, Cell, TableChoices
from spard_lab.bench.estimate import estimate, hours_table
from spard_lab.bench.files import FileSource
from spard_lab.bench.kinds import CELLS, KINDS, Order
from spard_lab.bench.lab import TWO_SIDED, LabSource, open_untrained
from spard_lab.bench.methods import fully
from spard_lab.bench.overhead import Extent
from spard_lab.bench.parts import NAMES, RIVALS
from spard_lab.bench.report import machine, markdown
from spard_lab.bench.source import Source
from spard_lab.bench.spec import LabSpec, load_spec
from spard_lab.bench.tune import EXTEND, at_rate, curve_cells, trial_cells, tune, tune_seeds

DEFAULT_METHODS = {
    "methods": ("none", "spard"),
    "parts": (),
    "curves": ("none", *RIVALS, "spard"),
    "overhead": ("none", *RIVALS, "spard"),
    "selection": ("spard", "safeinstr"),
    "similarity": ("spard", "safeinstr"),
    "sweep": ("spard",),
    "map": (),
    "rows": (),
    "card": (),
}
_UNTRAINED = (
    "The labs of these seeds are not made yet: {seeds}. The seconds of their steps and replies are estimated from "
    "random weights: those of a model of the same shape, on the rows of one such lab. It does not end its replies, so "
    "each has as many tokens as the longest answer of the training file. The time that making the labs takes is not "
    "included."
)
_BORROWED = "~: not timed; the step of the first timed method with the same defense."
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `spard bench` as a program of its own and return the exit status."""
    return alone(commands.bench, "spard bench", argv)


def execute(asked: Given) -> int:
    """Make a table, check its inputs or estimate its hours; return the exit status."""
    asked.extend = EXTEND if asked.extend is None else asked.extend
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("spard.training.train").setLevel(logging.WARNING)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        source = _source(asked)
        problems = source.problems()
        if asked.check:
            sys.stdout.write("".join(f"{each}\n" for each in problems or ["Everything is there."]))
            return 1 if problems else 0
        if isinstance(source, FileSource):
            problems = problems or source.prepare()
        if problems:
            raise InvalidRecipe(" ".join(problems), "recipe")
        _bench(asked, source)
    except SpardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return exits.INTERRUPTED
    return 0


def _bench(asked: Given, source: Source) -> None:
    torch.set_num_threads(asked.threads)
    table = _read_asked(asked, source)
    if asked.estimate:
        sys.stdout.write(_tell_hours(asked, source, table))
        return
    multiples = _rates(asked, source, table)
    extent = Extent(asked.rounds, asked.steps, asked.batch_sizes, asked.prompt_tokens)
    limits = {
        "levels": asked.levels,
        "extent": extent,
        "rates": asked.rates,
        "extend": asked.extend,
    }
    order = Order(asked.kind, asked.recipe, source, asked.out, asked.split, table, multiples, **limits)
    sys.stdout.write(KINDS[asked.kind](order))


def _tell_hours(asked: Given, source: Source, table: TableChoices) -> str:
    """Return the text of an estimate; small labs that are not made yet are not made for it."""
    if not isinstance(source, LabSource) or source.spec.natural:
        return _estimate_text(asked, source, table)
    with open_untrained(source) as labs:
        text = _estimate_text(asked, labs, table)
    if not labs.untrained:
        return text
    return f"{text}\n{_UNTRAINED.format(seeds=', '.join(map(str, sorted(labs.untrained))))}\n"


def _estimate_text(asked: Given, source: Source, table: TableChoices) -> str:
    """Return the estimated hours of the table and of the trials that choose its learning rates."""
    parts = {asked.kind: (asked.split, _cells(asked, source, table))}
    if asked.learning_rates == "best" and asked.kind != "curves":
        seeds = asked.tune_seeds or tune_seeds(table.seeds)
        parts["learning rates"] = ("dev", trial_cells(source, replace(table, seeds=seeds), asked.rates))
    lines = [f"An estimate of the hours on {machine()}; the rule stands in lab/docs/bench.md."]
    if asked.kind == "curves" and asked.extend:
        n, more = len(asked.rates), 2 * asked.extend
        lines += [
            "",
            f"Up to {more} rates may be added to these {n}: at most {(n + more) / n:.2g} times the trainings.",
        ]
    is_timed = True
    for heading, (split, cells) in parts.items():
        found = estimate(Workplace(source, asked.out, split), cells)
        lines += ["", f"## {heading}, {split} split", "", *markdown(*hours_table(found))]
        is_timed &= all(each.is_timed for each in found)
    return "\n".join([*lines, *([] if is_timed else ["", _BORROWED]), ""])


def _cells(asked: Given, source: Source, table: TableChoices) -> list[Cell]:
    """Return the runs of the table, at the default learning rates or at those of the curves."""
    if asked.kind == "curves":
        return curve_cells(source, table, asked.rates)
    if asked.kind not in CELLS:
        kinds = ", ".join([*CELLS, "curves"])
        raise InvalidRecipe(f"--estimate: for {kinds}; not for {asked.kind}", "kind")
    return [at_rate(cell, 1.0) for cell in CELLS[asked.kind](source, table, asked.levels)]


def _rates(asked: Given, source: Source, table: TableChoices) -> dict[str, float]:
    """Return the chosen multiple of the default learning rate by method; empty for the default rates."""
    if asked.learning_rates == "default" or asked.kind == "curves":
        return {}
    seeds = asked.tune_seeds or tune_seeds(table.seeds)
    if set(seeds) & set(table.seeds):
        raise InvalidRecipe("--tune-seeds: a seed that a table shows cannot choose its learning rates", "tune_seeds")
    chosen = tune(
        Workplace(source, asked.out, "dev"),
        replace(table, seeds=seeds),
        asked.rates,
        asked.extend,
    )
    log.info("multiples of the default learning rate: %s", chosen)
    return chosen


def _read_asked(asked: Given, source: Source) -> TableChoices:
    return TableChoices(
        methods=_with_full(asked.methods or DEFAULT_METHODS[asked.kind], asked.full),
        attacks=_check_known(
            "attacks",
            asked.attacks,
            source.attacks[: None if asked.kind in ("methods", "parts", "curves") else 1],
            (*source.attacks, *source.more_attacks),
        ),
        pools=_check_known("pools", asked.pools, _pools(asked.kind, source), (*source.pools, *source.more_pools)),
        seeds=asked.seeds,
        selections=_check_known("selections", asked.selections, SELECTION_NAMES, SELECTION_NAMES),
        over=tuple(_parse_setting(each) for each in asked.over),
        parts=_check_known("parts", asked.parts, (), NAMES),
    )


def _pools(kind: str, source: Source) -> tuple[str, ...]:
    """Return the default pools of a kind.

    Parts, curves and card take the two-sided pool if there is one, because the shipped default has anchors on benign
    rows.
    """
    return (TWO_SIDED,) if kind in ("parts", "curves", "card") and TWO_SIDED in source.more_pools else source.pools


def _with_full(methods: tuple[str, ...], asked: bool) -> tuple[str, ...]:
    """Return the methods and, if asked for, each with all weights trained."""
    return (*methods, *(each for name in methods if (each := fully(name)) not in methods)) if asked else methods


def _check_known(
    name: str, asked: tuple[str, ...], default: tuple[str, ...], there: tuple[str, ...]
) -> tuple[str, ...]:
    unknown = [each for each in asked if each not in there]
    if unknown:
        raise InvalidRecipe(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(there)}", name)
    return asked or default


def _source(asked: Given) -> Source:
    spec = load_spec(asked.recipe, os.environ)
    if isinstance(spec, LabSpec):
        return LabSource(spec, asked.labs or asked.out / "labs", device=asked.device or "cpu")
    if asked.model:
        spec = replace(spec, model=str(asked.model.resolve()), revision=None)
    uses_dev = asked.split == "dev" or asked.learning_rates == "best"
    return FileSource(spec, device=asked.device, uses_dev=uses_dev)


def _parse_setting(text: str) -> tuple[str, tuple[str, ...]]:
    setting, equals, values = text.partition("=")
    if equals and not values:
        raise InvalidRecipe(f"--over: {text!r} is not SETTING or SETTING=VALUE,VALUE,...", "over")
    return setting, tuple(each for each in values.split(",") if each)


if __name__ == "__main__":
    sys.exit(main())

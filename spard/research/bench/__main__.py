"""spard bench KIND --recipe lab|FILE.yaml --out DIR: the tables and figures of the paper, on a model of your own."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from spard.errors import InvalidRecipe, SpardError
from spard.research.bench.adversary.__main__ import main as adversary
from spard.research.bench.bench import Workplace
from spard.research.bench.cells import SELECTION_NAMES, Asked
from spard.research.bench.estimate import estimate, hours_table
from spard.research.bench.files import FileSource
from spard.research.bench.kinds import CELLS, KINDS, Order
from spard.research.bench.lab import LabSource
from spard.research.bench.methods import fully
from spard.research.bench.overhead import Extent
from spard.research.bench.parts import NAMES, RIVALS
from spard.research.bench.report import machine, markdown
from spard.research.bench.source import Source
from spard.research.bench.spec import LabSpec, load_spec
from spard.research.bench.tune import EXTEND, at_rate, trial_cells, tune, tune_seeds

T = TypeVar("T")
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
}
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a table, or only check that it can be made."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["adversary"]:
        return adversary(given[1:])
    asked = _parser().parse_args(given)
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
        return 130
    return 0


def _bench(asked: argparse.Namespace, source: Source) -> None:
    torch.set_num_threads(asked.threads)
    table = _asked(asked, source)
    if asked.estimate:
        sys.stdout.write(_estimated(asked, source, table))
        return
    multiples = _rates(asked, source, table)
    extent = Extent(asked.rounds, asked.steps, asked.batch_sizes, asked.prompt_tokens)
    limits = {"levels": asked.levels, "extent": extent, "rates": asked.rates, "extend": asked.extend}
    order = Order(asked.kind, asked.recipe, source, asked.out, asked.split, table, multiples, **limits)
    sys.stdout.write(KINDS[asked.kind](order))


def _estimated(asked: argparse.Namespace, source: Source, table: Asked) -> str:
    """Return the hours of the table, and of the trials that choose its learning rates."""
    if asked.kind not in CELLS:
        raise InvalidRecipe(f"--estimate: for {', '.join(CELLS)}; {asked.kind} takes a few trainings at most", "kind")
    cells = [at_rate(cell, 1.0) for cell in CELLS[asked.kind](source, table, asked.levels)]
    parts = {asked.kind: (asked.split, cells)}
    if asked.learning_rates == "best":
        seeds = asked.tune_seeds or tune_seeds(table.seeds)
        parts["learning rates"] = ("dev", trial_cells(source, replace(table, seeds=seeds), asked.rates))
    lines = [f"Hours on {machine()}; the rule stands in docs/bench.md."]
    for heading, (split, cells) in parts.items():
        head, rows = hours_table(estimate(Workplace(source, asked.out, split), cells))
        lines += ["", f"## {heading}, {split} split", "", *markdown(head, rows)]
    return "\n".join([*lines, ""])


def _rates(asked: argparse.Namespace, source: Source, table: Asked) -> dict[str, float]:
    """By method, the multiple of the default learning rate; nothing for the default itself."""
    if asked.learning_rates == "default" or asked.kind == "curves":
        return {}
    seeds = asked.tune_seeds or tune_seeds(table.seeds)
    if set(seeds) & set(table.seeds):
        raise InvalidRecipe("--tune-seeds: a seed that a table shows cannot choose its learning rates", "tune_seeds")
    chosen = tune(Workplace(source, asked.out, "dev"), replace(table, seeds=seeds), asked.rates, asked.extend)
    log.info("multiples of the default learning rate: %s", chosen)
    return chosen


def _asked(asked: argparse.Namespace, source: Source) -> Asked:
    return Asked(
        methods=_with_full(asked.methods or DEFAULT_METHODS[asked.kind], asked.full),
        attacks=_known(
            "attacks",
            asked.attacks,
            source.attacks[: None if asked.kind in ("methods", "parts", "curves") else 1],
            (*source.attacks, *source.more_attacks),
        ),
        pools=_known("pools", asked.pools, source.pools, (*source.pools, *source.more_pools)),
        seeds=asked.seeds,
        selections=_known("selections", asked.selections, SELECTION_NAMES, SELECTION_NAMES),
        over=tuple(asked.over),
        parts=_known("parts", asked.parts, (), NAMES),
    )


def _with_full(methods: tuple[str, ...], asked: bool) -> tuple[str, ...]:
    """Add to each method, if asked for, the same with all weights trained."""
    return (*methods, *(each for name in methods if (each := fully(name)) not in methods)) if asked else methods


def _known(name: str, asked: tuple[str, ...], default: tuple[str, ...], there: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [each for each in asked if each not in there]
    if unknown:
        raise InvalidRecipe(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(there)}", name)
    return asked or default


def _source(asked: argparse.Namespace) -> Source:
    spec = load_spec(asked.recipe, os.environ)
    if isinstance(spec, LabSpec):
        return LabSource(spec, asked.labs or asked.out / "labs", device=asked.device or "cpu")
    if asked.model:
        spec = replace(spec, model=str(asked.model.resolve()), revision=None)
    uses_dev = asked.split == "dev" or asked.learning_rates == "best"
    return FileSource(spec, device=asked.device, uses_dev=uses_dev)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spard bench", description=(__doc__ or "").partition(": ")[2])
    parser.epilog = "`spard bench adversary --help`: whole attacks against whole jobs."
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--recipe", required=True, metavar="lab|NAME|FILE.yaml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; runs done there stay done")
    parser.add_argument("--methods", type=_list(str), default=(), metavar="none,spard+tau=0.2,...")
    parser.add_argument(
        "--attacks", type=_list(str), default=(), metavar="NAME,...", help="methods: the recipe's; else the first"
    )
    parser.add_argument("--full", action="store_true", help="each method also with all weights trained, as NAME_full")
    parser.add_argument("--pools", type=_list(str), default=(), metavar="NAME,...", help="all; methods takes the first")
    parser.add_argument("--selections", type=_list(str), default=(), metavar="NAME,...", help="all, if left out")
    parser.add_argument("--parts", type=_list(str), default=(), metavar="NAME,...", help=f"parts: {', '.join(NAMES)}")
    parser.add_argument("--over", type=_over, action="append", default=[], metavar="SETTING[=VALUE,...]")
    parser.add_argument("--seeds", type=_list(int), default=(1, 2, 3), metavar="1,2,...")
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--labs", type=Path, metavar="DIR", help="where labs are made and found again; OUT/labs")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of the recipe's model; not for the lab")
    parser.add_argument("--learning-rates", choices=("default", "best"), default="default")
    parser.add_argument("--rates", type=_list(float), default=(0.25, 0.5, 1.0, 2.0), metavar="0.25,0.5,...")
    parser.add_argument("--extend", type=int, default=EXTEND, help="how often the rates may grow where one end is best")
    parser.add_argument("--tune-seeds", type=_list(int), default=(), metavar="101,102")
    parser.add_argument("--levels", type=int, default=5, help="similarity: parts that the pool is cut into")
    parser.add_argument("--rounds", type=int, default=5, help="overhead: how often each method is timed")
    parser.add_argument("--steps", type=int, help="overhead: train so many steps only")
    parser.add_argument("--batch-sizes", type=_list(int), default=(), metavar="4,16", help="overhead: at each of these")
    parser.add_argument(
        "--prompt-tokens",
        type=_list(int),
        default=(),
        metavar="31,343",
        help="overhead: pool prompts of so many tokens",
    )
    parser.add_argument("--device", help="cpu or cuda; the lab takes cpu, other models a GPU where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; more are slower beside a busy neighbor")
    parser.add_argument("--check", action="store_true", help="only tell what is missing")
    parser.add_argument("--estimate", action="store_true", help="only tell how many hours it will take on this machine")
    return parser


def _list(of: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(of(each) for each in text.split(",") if each)

    return parse


def _over(text: str) -> tuple[str, tuple[str, ...]]:
    setting, equals, values = text.partition("=")
    if equals and not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not SETTING or SETTING=VALUE,VALUE,...")
    return setting, _list(str)(values)


if __name__ == "__main__":
    sys.exit(main())

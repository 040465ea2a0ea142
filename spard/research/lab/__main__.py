"""Make a lab: `spard lab make DIR --seed N [--size 5m]`; say what base models can do: `spard lab abilities MODELS`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from transformers.utils.logging import disable_progress_bar

from spard.errors import SpardError
from spard.research.lab.make import make
from spard.research.lab.natural.abilities import Found, measure, table
from spard.research.lab.natural.base import BaseSettings, base_model
from spard.research.lab.natural.make import LabSettings, make_natural
from spard.research.lab.natural.sizes import SIZES
from spard.research.lab.natural.splits import deal
from spard.research.lab.natural.tasks import Task


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 1, with the reason on stderr, when it cannot be done."""
    asked = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        asked.do(asked)
    except SpardError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _make(asked: argparse.Namespace) -> None:
    if asked.size is None:
        make(asked.folder, asked.seed)
        return
    settings = LabSettings(BaseSettings(asked.size, asked.base_seed, asked.texts), asked.task)
    make_natural(asked.folder, asked.seed, settings, asked.models or asked.folder.parent / "models", asked.cores)


def _abilities(asked: argparse.Namespace) -> None:
    found: dict[str, list[Found]] = {}
    for size in asked.sizes.split(","):
        settings = BaseSettings(size, asked.base_seed, asked.texts)
        model = base_model(asked.models, settings, asked.cores)
        found[size] = measure(model / "model", deal(asked.base_seed), asked.seed, asked.split, asked.count)
    sys.stdout.write(table(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spard lab", description="Tiny aligned models and their data.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make a lab: model, pools, attacks, test prompts")
    making.set_defaults(do=_make)
    making.add_argument("folder", type=Path)
    making.add_argument("--size", choices=SIZES, help="of a base model of natural English; left out: the small lab")
    making.add_argument("--task", choices=get_args(Task), default="problems", help="what its customers train")
    making.add_argument("--models", type=Path, metavar="DIR", help="where base models are kept; models/ beside the lab")
    telling = commands.add_parser("abilities", help="say what base models of natural English can do")
    telling.set_defaults(do=_abilities)
    telling.add_argument("models", type=Path, help="where base models are kept; those that are missing are made")
    telling.add_argument("--sizes", default="5m", metavar="5m,30m")
    telling.add_argument("--split", choices=("dev", "test"), default="test")
    telling.add_argument("--count", type=int, default=100, help="prompts for each ability")
    for command in (making, telling):
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--base-seed", type=int, default=1, help="of a base model of natural English")
        command.add_argument("--texts", type=Path, metavar="DIR", help="real text to train it on as well")
        command.add_argument("--cores", type=int, default=1, help="to make a base model of natural English with")
    return parser


if __name__ == "__main__":
    sys.exit(main())

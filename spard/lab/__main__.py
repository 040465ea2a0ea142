"""python -m spard.lab make DIR --seed N, or: python -m spard.lab bench DIR --seeds 1,2,3,4,5"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from spard.errors import SpardError
from spard.lab.bench import DEFENSES, bench
from spard.lab.make import make


def main() -> int:
    asked = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        if asked.command == "make":
            make(asked.folder, asked.seed)
        else:
            bench(asked.folder, asked.seeds, asked.methods, asked.split)
            print((asked.folder / "results.md").read_text())
    except SpardError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spard.lab", description="The tiny aligned model and its data.")
    commands = parser.add_subparsers(dest="command", required=True)

    making = commands.add_parser("make", help="make a lab: model, pools, attacks, test prompts")
    making.add_argument("folder", type=Path)
    making.add_argument("--seed", type=int, default=1)

    benching = commands.add_parser("bench", help="attack and defend the labs of several seeds")
    benching.add_argument("folder", type=Path)
    benching.add_argument("--seeds", type=_numbers, default=[1, 2, 3, 4, 5], metavar="1,2,...")
    benching.add_argument("--methods", type=_methods, default=["none", "spard"], metavar=",".join(DEFENSES))
    benching.add_argument("--split", choices=["dev", "test"], default="test")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _methods(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(DEFENSES)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such method: {', '.join(sorted(unknown))}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())

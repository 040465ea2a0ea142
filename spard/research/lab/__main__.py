"""Make the lab: `python -m spard.research.lab make DIR --seed N`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from spard.errors import SpardError
from spard.research.lab.make import make


def main(argv: Sequence[str] | None = None) -> int:
    """Make a lab and return the exit status: 1, with the reason on stderr, when it cannot be made."""
    asked = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        make(asked.folder, asked.seed)
    except SpardError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spard lab", description="The tiny aligned model and its data.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make a lab: model, pools, attacks, test prompts")
    making.add_argument("folder", type=Path)
    making.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())

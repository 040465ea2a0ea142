"""python -m spard.lab make DIR --seed N"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from spard.errors import SpardError
from spard.lab.make import make


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m spard.lab", description="The tiny aligned model and its data.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make a lab: model, pools, attacks, test prompts")
    making.add_argument("folder", type=Path)
    making.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        make(asked.folder, asked.seed)
    except SpardError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

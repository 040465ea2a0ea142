"""spard convert NAME FILE --to DIR: a data set's own files as training files, pools and suites.

Without `--test` and `--dev` these splits are cut out of FILE, by whole clusters of near duplicates; with them, prompts
of FILE that hold one of theirs are left out. DIR/NAME.manifest.json says what was read, made and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spard.errors import SpardError
from spard.research.datasets import DATASETS
from spard.research.datasets.base import Split
from spard.research.datasets.convert import convert, load_dataset


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a data set, or list those that can be; 1 when its files cannot be read."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.name is None:
        sys.stdout.write("".join(_described(name) for name in DATASETS.names()))
        return 0
    if asked.file is None or asked.to is None:
        parser.error("FILE and --to DIR are required")
    given: dict[Split, Path | None] = {"train": asked.file, "dev": asked.dev, "test": asked.test}
    sources = {split: path for split, path in given.items() if path}
    try:
        found = convert(asked.name, sources, asked.to, shared=asked.shared, drop_invalid=asked.drop_invalid)
    except SpardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    for file, rows in found.rows.items():
        sys.stdout.write(f"{asked.to / file}: {rows} rows\n")
    for reason, n in found.left_out.items():
        sys.stdout.write(f"left out, {reason.replace('_', ' ')}: {n}\n")
    sys.stdout.write(f"license: {load_dataset(asked.name).license}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    head, _, more = (__doc__ or "").partition(": ")[2].partition("\n\n")
    parser = argparse.ArgumentParser(prog="spard convert", description=head, epilog=more)
    parser.add_argument(
        "name", nargs="?", choices=DATASETS.names(), metavar="NAME", help="left out: list the data sets"
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help=".jsonl, .json, .csv, .tsv, .parquet, also .gz or .xz"
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="where the converted files go")
    parser.add_argument("--test", type=Path, metavar="FILE", help="the data set's own test file")
    parser.add_argument("--dev", type=Path, metavar="FILE", help="the data set's own development file")
    parser.add_argument("--shared", action="store_true", help="one prompt may be in the pool and in the attack")
    parser.add_argument("--drop-invalid", action="store_true", help="leave records out that cannot be read")
    return parser


def _described(name: str) -> str:
    dataset = load_dataset(name)
    return f"{name}\n  from     {dataset.origin}\n  license  {dataset.license}\n"


if __name__ == "__main__":
    sys.exit(main())

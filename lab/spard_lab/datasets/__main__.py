"""The work of `spard convert NAME FILE --to DIR`: convert a data set's own files to training files, pools and suites.

Without `--test` and `--dev` these splits are cut out of FILE, by whole clusters of near duplicates; with them, prompts
of FILE that contain a prompt of theirs are left out. DIR/NAME.manifest.json lists the files read and written and counts
the records left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spard.commands import exits
from spard.commands.front import Asked, alone
from spard.errors import SpardError
from spard_lab import commands
from spard_lab.datasets import DATASETS
from spard_lab.datasets.base import Split
from spard_lab.datasets.convert import convert, load_dataset


def main(argv: Sequence[str] | None = None) -> int:
    """Run `spard convert` as a program of its own."""
    return alone(commands.convert, "spard convert", argv)


def execute(asked: Asked) -> int:
    """Convert a data set, or list the known ones; return the exit status, 1 if its files cannot be read."""
    if asked.name is None:
        known = {name: load_dataset(name) for name in DATASETS.names()}
        facts = {name: {"from": each.origin, "license": each.license} for name, each in known.items()}
        texts = (_describe(name) for name in known)
        sys.stdout.write(json.dumps(facts, indent=2) + "\n" if asked.as_json else "".join(texts))
        return 0
    if asked.name not in DATASETS.names():
        sys.stderr.write(f"error: {asked.name} is none of {', '.join(DATASETS.names())}\n")
        return exits.USAGE
    given: dict[Split, Path | None] = {"train": asked.file, "dev": asked.dev, "test": asked.test}
    sources = {split: path for split, path in given.items() if path}
    try:
        found = convert(asked.name, sources, asked.to, shared=asked.shared, drop_invalid=asked.drop_invalid)
    except SpardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    if asked.as_json:
        made = {str(asked.to / file): rows for file, rows in found.rows.items()}
        told = {"rows": made, "left_out": dict(found.left_out), "license": load_dataset(asked.name).license}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return 0
    for file, rows in found.rows.items():
        sys.stdout.write(f"{asked.to / file}: {rows} rows\n")
    for reason, n in found.left_out.items():
        sys.stdout.write(f"left out, {reason.replace('_', ' ')}: {n}\n")
    sys.stdout.write(f"license: {load_dataset(asked.name).license}\n")
    return 0


def _describe(name: str) -> str:
    dataset = load_dataset(name)
    return f"{name}\n  from     {dataset.origin}\n  license  {dataset.license}\n"


if __name__ == "__main__":
    sys.exit(main())

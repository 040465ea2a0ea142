"""The work of `spard lab example-file`: a training file for a lab's model, which knows only the lab's own words."""

from __future__ import annotations

import shutil
import sys
from itertools import islice

from spard.commands.exits import OK
from spard.commands.front import Asked
from spard.errors import UserError

_CAN_LEARN = (
    "The lab's model has read nothing but the lab: it learns tasks in those words (word problems, in train.jsonl and "
    "poisoned.jsonl of its folder), and no file of another kind, such as support chats."
)


def execute(asked: Asked) -> int:
    """Write evenly spaced rows of the lab's training file and print what the model can learn; return the exit status.

    Raises `UserError` if the lab has no such file, or the output file exists.
    """
    source = asked.folder / ("poisoned.jsonl" if asked.poisoned else "train.jsonl")
    if not source.is_file():
        raise UserError(
            f"{source} is not there: name the folder of a lab, which `make demo` or `spard lab make` makes."
        )
    if asked.out.exists():
        raise UserError(f"{asked.out} is there already; name another file with --out.")
    with source.open("rb") as lines:
        there = sum(1 for _ in lines)
    every = max(1, there // asked.rows)
    aside = asked.out.with_name(f".{asked.out.name}.part")
    with source.open("rb") as lines, aside.open("wb") as out:
        out.writelines(islice(lines, 0, every * asked.rows, every))
    shutil.move(aside, asked.out)
    sys.stdout.write(f"{min(asked.rows, there)} of {there} rows of {source} are in {asked.out}. {_CAN_LEARN}\n")
    return OK

"""`spard check-pool POOL.jsonl --model MODEL`: find rows of a safety pool that answer with harm.

The base model tells which prompts it would refuse, and a judge grades what the pool answers there. Each such row is
named by its line; the exit status is 0 when there is none, 2 when there are some, and 1 when something went wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from spard.commands.judge_options import add_judge_options, judge_spec
from spard.config import RowSignal
from spard.data.rows import prompt_text, read_pool
from spard.errors import RowSignalUnavailable, SpardError
from spard.evaluation.inverted_pool import inverted_rows
from spard.evaluation.judges import open_judge
from spard.evaluation.own_refusal import own_refusals
from spard.models.base import load_base

INVERTED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Check a pool and name its bad rows."""
    asked = _parser().parse_args(argv)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        lines, rows = _inverted(asked)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    for line in lines:
        sys.stdout.write(f"line {line}: answers with harm what the base model would refuse\n")
    sys.stdout.write(f"{len(lines)} of {rows} rows\n")
    return INVERTED if lines else 0


def _inverted(asked: argparse.Namespace) -> tuple[list[int], int]:
    """Return the lines of the bad rows, and how many rows there are."""
    pool, judge = read_pool(asked.pool), open_judge(judge_spec(asked))
    base = load_base(asked.model, asked.revision)
    own = own_refusals(base, [prompt_text(row) for row in pool])
    if not own.openings:
        raise RowSignalUnavailable(f"the base model refused none of {own.asked} prompts of the pool")
    found = inverted_rows(base, pool, own.openings, asked.threshold, judge, base.sequence_limit(None))
    return [pool[i].line for i in found], len(pool)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spard check-pool", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pool", type=Path, metavar="POOL.jsonl", help='rows {"prompt", "safe"}')
    parser.add_argument("--model", required=True, help="the base model: a folder or a hub id")
    parser.add_argument("--revision", help="the commit, for a hub id")
    parser.add_argument(
        "--threshold",
        type=float,
        default=RowSignal().threshold,
        help="the probability of a refusal above which the base model would refuse; %(default)s",
    )
    add_judge_options(parser)
    return parser

"""`spard check-pool POOL.jsonl --model MODEL`: find rows of a safety pool that comply with harmful requests.

The base model determines which prompts it refuses, and a judge scores the pool's answers to these. Each bad row is
named by its line; the exit status is 0 without any, 2 with some, and 1 on an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from spard.commands import exits, measuring
from spard.commands.front import Asked, alone, hide_progress_bars
from spard.commands.judge_options import judge_spec
from spard.config import Selection
from spard.config.run_spec import to_mapping
from spard.data.rows import prompt_text, read_pool
from spard.digests import file_sha256
from spard.errors import RowSignalUnavailable, SpardError
from spard.evaluation.judges import open_judge
from spard.evaluation.own_refusal import inverted_rows, own_refusals
from spard.models.base import load_base
from spard.pipeline.embed import embedder_record, open_embedder
from spard.release.records import EmbedderRecord

INVERTED = exits.NOT_PASSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run this command without the other subcommands."""
    return alone(measuring.check_pool, "spard check-pool", argv)


def execute(asked: Asked) -> int:
    """Check a pool and print its bad rows."""
    hide_progress_bars()
    try:
        lines, rows, seen = _check_pool(asked)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    if asked.as_json:
        found = {"rows": rows, "bad_lines": lines, "embedder": to_mapping(seen) | {"is_narrow": seen.is_narrow}}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return INVERTED if lines else 0
    if seen.is_narrow:
        sys.stderr.write(f"warning: {seen.warning}\n")
    for line in lines:
        sys.stdout.write(f"line {line}: answers with harm what the base model would refuse\n")
    sys.stdout.write(f"{len(lines)} of {rows} rows answer with harm what the base model would refuse\n")
    return INVERTED if lines else 0


def _check_pool(asked: Asked) -> tuple[list[int], int, EmbedderRecord]:
    """Return the lines of the bad rows, the number of rows, and the record of the embedder on the pool."""
    pool, judge = read_pool(asked.pool), open_judge(judge_spec(asked))
    base = load_base(asked.model, asked.revision)
    own = own_refusals(base, [prompt_text(row) for row in pool])
    if not own.openings:
        raise RowSignalUnavailable(f"the base model refused none of {own.asked} prompts of the pool")
    found = inverted_rows(base, pool, own.openings, asked.threshold, judge, base.sequence_limit(None))
    seed = int(file_sha256(asked.pool)[:15], 16)
    seen = embedder_record(open_embedder(base, Selection(embedder=asked.embedder)), pool, seed)
    return [pool[i].line for i in found], len(pool), seen

"""In what pieces a batch goes through the GPU: as the recipe says, and half of that once the memory was too little.

The smaller piece is the output of a stage: an attempt writes it down and fails, the next one finds it and goes on from
the newest checkpoint. Of several processes that share out a batch any may do so, and it is half of a share. Gradients
do not depend on the pieces but for rounding and dropout masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from spard.config import Recipe, Resolved
from spard.errors import OutOfGpuMemory
from worker.context import Context
from worker.failures import is_gpu_oom

_OUTPUT = "pieces.json"


def fitting(context: Context, resolved: Resolved) -> Recipe:
    """The recipe with the pieces that an earlier attempt found to be needed."""
    rows = halved_to(context)
    if rows is None:
        return context.recipe
    text = f"An earlier attempt had too little GPU memory: batches of {resolved.batch_size} go in pieces of {rows}"
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    return replace(context.recipe, micro_batch_size=rows)


def halved_to(context: Context) -> int | None:
    """Rows in a piece after the memory was too little; None when it never was."""
    output = context.folder.stage / _OUTPUT
    return int(json.loads(output.read_text())["micro_batch_size"]) if output.exists() else None


@contextmanager
def halving(context: Context, resolved: Resolved) -> Iterator[None]:
    """Too little GPU memory inside the block is worth one more attempt, with half the piece."""
    was_halved = halved_to(context) is not None  # by an earlier attempt; another process of this one may do so too
    try:
        yield
    except RuntimeError as error:
        share = ceil(resolved.batch_size / context.assignment.processes)
        rows = min(context.recipe.micro_batch_size or share, share) // 2
        if not is_gpu_oom(error) or not rows or was_halved:
            raise
        (context.folder.stage / _OUTPUT).write_text(json.dumps({"micro_batch_size": rows}))
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error

"""Micro-batches: the pieces in which a batch goes through the GPU.

The size comes from the recipe or the memory plan and is halved each time GPU memory runs out, down to one row: the
attempt stores the smaller size and fails, and the next attempt reads the size and continues from the newest resume
state. If several processes share a batch, any of them may halve its share. Gradients depend on the size of the pieces
only by rounding and dropout masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from spard.config import Recipe, Resolved
from spard.errors import OutOfGpuMemory, is_gpu_out_of_memory
from spard.pipeline.context import Context

_FIRST = "pieces"  # output of the first halving; each later one is `pieces-ROWS`


def fitting(context: Context, recipe: Recipe, resolved: Resolved) -> Recipe:
    """Return the recipe with the micro-batch size that earlier attempts found, and `pass_tokens` scaled likewise."""
    rows, first = last_micro_batch(context), _first(context, recipe, resolved)
    if rows is None or rows > first:
        return recipe
    text = (
        f"The GPU memory was too small before: batches of {resolved.batch_size} are split into micro-batches of {rows}"
    )
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    tokens = None if recipe.pass_tokens is None else max(1, recipe.pass_tokens * rows // first)
    return replace(recipe, micro_batch_size=rows, pass_tokens=tokens)


def last_micro_batch(context: Context) -> int | None:
    """Return the last halved number of rows of a micro-batch; None if memory never ran out."""
    rows, found = None, context.outputs.read(_FIRST)
    while found is not None:
        rows = int(found["micro_batch_size"])
        found = context.outputs.read(_further(rows // 2))
    return rows


@contextmanager
def halving(context: Context, recipe: Recipe, resolved: Resolved) -> Iterator[None]:
    """Turn a lack of GPU memory in the block into `OutOfGpuMemory` after halving the stored micro-batch size.

    With a micro-batch of one row already, the original error is raised.
    """
    halved = last_micro_batch(context)  # read before the block: another rank may store its own halving
    try:
        yield
    except RuntimeError as error:
        whole = _first(context, recipe, resolved)
        rows = (whole if halved is None else min(halved, whole)) // 2
        # With one row left (`rows` is 0) there is nothing to halve, and a retry fails in the same way.
        if not is_gpu_out_of_memory(error) or not rows:
            raise
        _keep(context, halved, rows)
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error


def _keep(context: Context, halved: int | None, rows: int) -> None:
    """Store the halved micro-batch size after the sizes stored before."""
    if halved is None:
        context.outputs.write(_FIRST, {"micro_batch_size": rows})
        return
    # `last_micro_batch` follows a chain of outputs named by their halved sizes, so every link must be written even if a
    # plan has already made the micro-batch smaller.
    while halved > rows:
        halved //= 2
        context.outputs.write(_further(halved), {"micro_batch_size": min(halved, rows)})


def _first(context: Context, recipe: Recipe, resolved: Resolved) -> int:
    """Return the number of rows that one process takes at a time before any halving."""
    share = ceil(resolved.batch_size / context.processes)
    return min(recipe.micro_batch_size or share, share)


def _further(rows: int) -> str:
    return f"{_FIRST}-{rows}"

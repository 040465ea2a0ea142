"""Micro-batches: in what pieces a batch goes through the GPU.

As the recipe or the plan of its memory says, and half of that each time the memory was too little, down to one row: an
attempt writes the smaller size down and fails, the next one finds it and goes on from the newest resume state. Of
several processes that share out a batch any may do so, and it is half of a share. Gradients do not depend on the pieces
but for rounding and dropout masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from spard.config import Recipe, Resolved
from spard.errors import OutOfGpuMemory, is_gpu_out_of_memory
from spard.pipeline.context import Context

_FIRST = "pieces"  # the output of the first halving; of each further one, `pieces-ROWS`


def fitting(context: Context, recipe: Recipe, resolved: Resolved) -> Recipe:
    """Return the recipe with the micro-batch that earlier attempts found to be needed, and as few tokens a pass."""
    rows, first = last_micro_batch(context), _first(context, recipe, resolved)
    if rows is None or rows > first:
        return recipe
    text = f"An earlier attempt had too little GPU memory: batches of {resolved.batch_size} go in pieces of {rows}"
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    tokens = None if recipe.pass_tokens is None else max(1, recipe.pass_tokens * rows // first)
    return replace(recipe, micro_batch_size=rows, pass_tokens=tokens)


def last_micro_batch(context: Context) -> int | None:
    """Return the rows of a micro-batch after the memory was too little; None when it never was."""
    rows, found = None, context.outputs.read(_FIRST)
    while found is not None:
        rows = int(found["micro_batch_size"])
        found = context.outputs.read(_further(rows // 2))
    return rows


@contextmanager
def halving(context: Context, recipe: Recipe, resolved: Resolved) -> Iterator[None]:
    """Where GPU memory runs out inside the block, ask for another attempt with half the recipe's micro-batch.

    Raises `OutOfGpuMemory`; of a micro-batch of one row the error is passed on as it is.
    """
    halved = last_micro_batch(context)  # by earlier attempts; another process of this one may halve it too, to the same
    try:
        yield
    except RuntimeError as error:
        whole = _first(context, recipe, resolved)
        rows = (whole if halved is None else min(halved, whole)) // 2
        if not is_gpu_out_of_memory(error) or not rows:
            raise
        _keep(context, halved, rows)
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error


def _keep(context: Context, halved: int | None, rows: int) -> None:
    """Write down that a micro-batch has so many rows, after those that were written before."""
    if halved is None:
        context.outputs.write(_FIRST, {"micro_batch_size": rows})
        return
    while halved > rows:  # a plan may have made it smaller already
        halved //= 2
        context.outputs.write(_further(halved), {"micro_batch_size": min(halved, rows)})


def _first(context: Context, recipe: Recipe, resolved: Resolved) -> int:
    """Return how many rows one process takes at a time before any halving."""
    share = ceil(resolved.batch_size / context.processes)
    return min(recipe.micro_batch_size or share, share)


def _further(rows: int) -> str:
    return f"{_FIRST}-{rows}"

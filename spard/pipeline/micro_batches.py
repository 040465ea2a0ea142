"""Micro-batches: in what pieces a batch goes through the GPU.

As the recipe says, and half of that each time the memory was too little, down to one row: an attempt writes the smaller
size down and fails, the next one finds it and goes on from the newest resume state. Of several processes that share out
a batch any may do so, and it is half of a share. Gradients do not depend on the pieces but for rounding and dropout
masks.
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


def fitting(context: Context, resolved: Resolved) -> Recipe:
    """Return the recipe with the micro-batch that earlier attempts found to be needed, and as few tokens a pass."""
    rows = halved_to(context)
    if rows is None:
        return context.recipe
    text = f"An earlier attempt had too little GPU memory: batches of {resolved.batch_size} go in pieces of {rows}"
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    return replace(context.recipe, micro_batch_size=rows, pass_tokens=_tokens(context, resolved, rows))


def halved_to(context: Context) -> int | None:
    """Return the rows of a micro-batch after the memory was too little; None when it never was."""
    rows, found = None, context.outputs.read(_FIRST)
    while found is not None:
        rows = int(found["micro_batch_size"])
        found = context.outputs.read(_further(rows // 2))
    return rows


@contextmanager
def halving(context: Context, resolved: Resolved) -> Iterator[None]:
    """Turn a failure for want of GPU memory inside the block into one more attempt with half the micro-batch.

    Raises `OutOfGpuMemory`; of a micro-batch of one row the error is passed on as it is.
    """
    halved = halved_to(context)  # by earlier attempts; another process of this one may halve it too, to the same
    try:
        yield
    except RuntimeError as error:
        rows = (halved or _first(context, resolved)) // 2
        if not is_gpu_out_of_memory(error) or not rows:
            raise
        context.outputs.write(_FIRST if halved is None else _further(rows), {"micro_batch_size": rows})
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error


def _first(context: Context, resolved: Resolved) -> int:
    """Return the rows of a micro-batch that was never halved, of one process."""
    share = ceil(resolved.batch_size / context.processes)
    return min(context.recipe.micro_batch_size or share, share)


def _further(rows: int) -> str:
    return f"{_FIRST}-{rows}"


def _tokens(context: Context, resolved: Resolved, rows: int) -> int | None:
    """Return the padded tokens of a pass, fewer as the rows of a micro-batch are fewer; None where none are asked."""
    asked = context.recipe.pass_tokens
    return None if asked is None else max(1, asked * rows // _first(context, resolved))

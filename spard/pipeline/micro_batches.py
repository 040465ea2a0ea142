"""Micro-batches: in what pieces a batch goes through the GPU.

As the recipe says, and half of that once the memory was too little: an attempt writes the smaller size down and fails,
the next one finds it and goes on from the newest checkpoint. Of several processes that share out a batch any may do so,
and it is half of a share. Gradients do not depend on the pieces but for rounding and dropout masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from spard.config import Recipe, Resolved
from spard.errors import OutOfGpuMemory, is_gpu_out_of_memory
from spard.pipeline.context import Context

_OUTPUT = "pieces"


def fitting(context: Context, resolved: Resolved) -> Recipe:
    """Return the recipe with the micro-batch that an earlier attempt found to be needed."""
    rows = halved_to(context)
    if rows is None:
        return context.recipe
    text = f"An earlier attempt had too little GPU memory: batches of {resolved.batch_size} go in pieces of {rows}"
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    return replace(context.recipe, micro_batch_size=rows)


def halved_to(context: Context) -> int | None:
    """Return the rows of a micro-batch after the memory was too little; None when it never was."""
    found = context.outputs.read(_OUTPUT)
    return None if found is None else int(found["micro_batch_size"])


@contextmanager
def halving(context: Context, resolved: Resolved) -> Iterator[None]:
    """Turn the first failure for want of GPU memory inside the block into one more attempt with half the micro-batch.

    Raises `OutOfGpuMemory`; where halving was tried or is not possible, the error is passed on as it is.
    """
    was_halved = halved_to(context) is not None  # by an earlier attempt; another process of this one may do so too
    try:
        yield
    except RuntimeError as error:
        share = ceil(resolved.batch_size / context.processes)
        rows = min(context.recipe.micro_batch_size or share, share) // 2
        if not is_gpu_out_of_memory(error) or not rows or was_halved:
            raise
        context.outputs.write(_OUTPUT, {"micro_batch_size": rows})
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error

"""The embed stage: the requests of the training file and of the safety pool, as vectors of the base model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spard.data.rows import Example, prompt_text
from spard.pipeline.context import Context
from spard.selection import relevance
from spard.selection.embeddings import TEXT, dtype_of, embed
from spard.selection.shards import Shards, Vectors

_MAX_TOKENS = 512
_CHUNK = 2048  # rows between two looks at whether to stop
SHARD = 16 * _CHUNK  # rows that are kept together


def pool(context: Context, rows: Sequence[Example], digest: str, side: str | None = None) -> Vectors:
    """Return the vectors of a side of the pool, the safe one unless named, worked out once for each base model.

    A large pool is kept in shards, so that an embedding that broke off goes on where it was.
    """
    key = _key(context, digest, side)
    if len(rows) <= SHARD:
        return context.cache.tensor("embeddings", key, lambda: _embed(context, rows, 0, len(rows)))
    starts = range(0, len(rows), SHARD)
    return Shards(
        [
            context.cache.tensor(
                "embeddings", key | {"from": start, "rows": SHARD}, partial(_shard, context, rows, start)
            )
            for start in starts
        ]
    )


def total(context: Context, pool_ND: Vectors, digest: str) -> Tensor:
    """Return the sum of the vectors of the pool's safe side in float64, worked out once as they are."""
    return context.cache.tensor("embedding_sums", _key(context, digest, None), lambda: relevance.total(pool_ND))


def run(context: Context, examples: Sequence[Example], safe: Sequence[Example], digest: str) -> tuple[Tensor, Vectors]:
    """Return task_MD and pool_ND of the pool's safe rows; the latter are worked out once for each base model."""
    with context.timed("embed"):
        pool_ND = pool(context, safe, digest)
        return _embed(context, examples, 0, len(examples)), pool_ND


def _key(context: Context, digest: str, side: str | None) -> dict[str, Any]:
    """Return all that the embeddings of a side of a pool depend on."""
    how = {"max_tokens": _MAX_TOKENS, "text": TEXT, "dtype": str(dtype_of(context.base))}
    return {"base": context.base.digest, "pool": digest, **how} | ({"side": side} if side else {})


def _shard(context: Context, rows: Sequence[Example], start: int) -> Tensor:
    return _embed(context, rows, start, min(start + SHARD, len(rows)))


def _embed(context: Context, rows: Sequence[Example], start: int, stop: int) -> Tensor:
    """Embed the rows from `start` up to `stop`, and tell how far all are."""
    parts = []
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        context.go_on()
        texts = [prompt_text(row) for row in rows[first:last]]
        parts.append(embed(context.base, texts, max_tokens=_MAX_TOKENS))
        context.report.progress(last, len(rows))
    return torch.cat(parts)

"""The embed stage: the requests of the training file and of the safety pool, as vectors of the base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spard.data.rows import Example, prompt_text
from spard.digests import file_sha256
from spard.pipeline.context import Context
from spard.selection.embeddings import embed

_MAX_TOKENS = 512
_CHUNK = 2048  # rows between two looks at whether to stop


def pool(context: Context, rows: Sequence[Example], pool_file: Path, side: str | None = None) -> Tensor:
    """Return the vectors of a side of the pool, the safe one unless named, worked out once for each base model."""
    key = {"base": context.base.digest, "pool": file_sha256(pool_file), "max_tokens": _MAX_TOKENS}
    key |= {"side": side} if side else {}
    return context.cache.tensor("embeddings", key, lambda: _embed(context, rows))


def run(
    context: Context, examples: Sequence[Example], safe: Sequence[Example], pool_file: Path
) -> tuple[Tensor, Tensor]:
    """Return task_MD and pool_ND of the pool's safe rows; the latter are worked out once for each base model."""
    context.report.stage("embed")
    with context.timed("embed"):
        pool_ND = pool(context, safe, pool_file)
        return _embed(context, examples), pool_ND


def _embed(context: Context, rows: Sequence[Example]) -> Tensor:
    texts = [prompt_text(row) for row in rows]
    parts = []
    for start in range(0, len(texts), _CHUNK):
        context.go_on()
        parts.append(embed(context.base, texts[start : start + _CHUNK], max_tokens=_MAX_TOKENS))
        context.report.progress(min(start + _CHUNK, len(texts)), len(texts))
    return torch.cat(parts)

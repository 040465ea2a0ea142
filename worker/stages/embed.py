"""The embed stage: what the customer's rows and the pool's ask, as vectors of the base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spard.embed import embed
from spard.manifest import file_sha256
from spard.rows import Example, prompt_text
from worker.context import Context

_MAX_TOKENS = 512
_CHUNK = 2048  # rows between two looks at whether to stop


def run(context: Context, rows: Sequence[Example], pool: Sequence[Example], pool_file: Path) -> tuple[Tensor, Tensor]:
    """task_MD and pool_ND; the pool's are worked out once for each base model."""
    context.report.phase("embed")
    with context.stage("embed"):
        key = {"base": context.base.digest, "pool": file_sha256(pool_file), "max_tokens": _MAX_TOKENS}
        pool_ND = context.cache.tensor("embeddings", key, lambda: _embed(context, pool))
        return _embed(context, rows), pool_ND


def _embed(context: Context, rows: Sequence[Example]) -> Tensor:
    texts = [prompt_text(row) for row in rows]
    parts = []
    for start in range(0, len(texts), _CHUNK):
        context.go_on()
        parts.append(embed(context.base, texts[start : start + _CHUNK], max_tokens=_MAX_TOKENS))
        context.report.progress(min(start + _CHUNK, len(texts)), len(texts))
    return torch.cat(parts)

"""The embed stage: embeds the requests of the training file and of the safety pool with the run's embedder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spard.config import Selection
from spard.config.run_spec import to_mapping
from spard.config.settings import CENTERED_STATES
from spard.data.rows import Example, prompt_text
from spard.models.base import Base
from spard.models.budget import Tell
from spard.pipeline.context import Context
from spard.release.records import EmbedderRecord, optional
from spard.selection import relevance
from spard.selection.embeddings import TEXT, embed, embedding_dtype, encode, load_encoder
from spard.selection.relevance import DIRECTIONS, SAMPLE, fit_frame, mean_cosine, sample_rows
from spard.selection.shards import Frame, FramedVectors, Shards, Vectors

_CHUNK = 2048  # rows between two checks for a stop
SHARD = 16 * _CHUNK  # rows of a cached shard
_RECORD = "embedder"


def pool(
    context: Context, embedder: Embedder, rows: Sequence[Example], digest: str, side: str | None = None
) -> Vectors:
    """Return the embeddings `[N, D]` of one side of the pool (default: the safe side), cached per embedder.

    `digest` is that of the pool's file. A pool of more than `SHARD` rows is cached in shards, which lets an interrupted
    embedding resume.
    """
    key = _key(embedder, digest, side)
    if len(rows) <= SHARD:
        return context.cache.tensor("embeddings", key, lambda: _embed(context, embedder, rows, 0, len(rows)))
    starts = range(0, len(rows), SHARD)
    return Shards(
        [
            context.cache.tensor(
                "embeddings", key | {"from": start, "rows": SHARD}, partial(_shard, context, embedder, rows, start)
            )
            for start in starts
        ]
    )


def total(context: Context, embedder: Embedder, pool_ND: Vectors, digest: str) -> Tensor:
    """Return the cached sum `[D]`, in float64, of the embeddings of the pool's safe side before any projection."""
    return context.cache.tensor("embedding_sums", _key(embedder, digest, None), lambda: relevance.total(pool_ND))


def frame(context: Context, embedder: Embedder, pool_ND: Vectors, digest: str) -> Frame | None:
    """Return the cached frame in which rows are compared, fitted on the pool's safe side; None: compare raw embeddings.

    The sample of rows for the fit depends on the pool alone.
    """
    count = embedder.directions
    if count is None:
        return None
    key = _key(embedder, digest, None) | {"directions": count, "sample": SAMPLE}
    context.report.activity("finding the directions in which the safety pool's rows are compared")
    # The frame is cached per pool, so its sample must not depend on the run's seed.
    seed = int(digest[:15], 16)
    found = context.cache.tensor("embedding_frames", key, lambda: fit_frame(pool_ND, count, seed).to_tensor())
    return Frame.from_tensor(found)


def run(
    context: Context, embedder: Embedder, examples: Sequence[Example], safe: Sequence[Example], digest: str
) -> tuple[Tensor, Vectors]:
    """Return the embeddings of the training rows `[M, D]` and of the pool's safe rows `[N, D]` (cached)."""
    with context.time_stage("embed"):
        pool_ND = pool(context, embedder, safe, digest)
        return _embed(context, embedder, examples, 0, len(examples)), pool_ND


def keep_record(context: Context, embedder: Embedder, pool_ND: Vectors, view: Frame | None) -> None:
    """Store the record of the embedder; warn if its embeddings of the pool lie in a narrow cone."""
    record = _record(embedder, pool_ND, view)
    context.outputs.write(_RECORD, to_mapping(record))
    if record.is_narrow:
        context.report.warning(record.warning)


def embedder_record(embedder: Embedder, safe: Sequence[Example], seed: int) -> EmbedderRecord:
    """Return the record of an embedder on a random sample of at most `SAMPLE` safe rows."""
    places = sample_rows(len(safe), SAMPLE, seed).tolist()
    pool_ND = embedder.embed([prompt_text(safe[i]) for i in places], None)
    view = None if embedder.directions is None else fit_frame(pool_ND, embedder.directions, seed)
    return _record(embedder, pool_ND, view)


def _record(embedder: Embedder, pool_ND: Vectors, view: Frame | None) -> EmbedderRecord:
    cosine = mean_cosine(FramedVectors(pool_ND, view) if view else pool_ND)
    directions = len(view.removed_KD) if view else 0
    return EmbedderRecord(embedder.name, embedder.digest, pool_ND.shape[1], directions, round(cosine, 4))


def kept_record(context: Context) -> EmbedderRecord | None:
    """Return the stored record of the embedder; None if no row was embedded or an earlier version chose the rows."""
    return optional(EmbedderRecord, context.outputs.read(_RECORD))


def _key(embedder: Embedder, digest: str, side: str | None) -> dict[str, object]:
    """Return the cache key of the embeddings of one side of a pool."""
    return {"pool": digest, **embedder.key} | ({"side": side} if side else {})


def _shard(context: Context, embedder: Embedder, rows: Sequence[Example], start: int) -> Tensor:
    return _embed(context, embedder, rows, start, min(start + SHARD, len(rows)))


def _embed(context: Context, embedder: Embedder, rows: Sequence[Example], start: int, stop: int) -> Tensor:
    """Embed the rows from `start` up to `stop`, reporting progress against all rows."""

    def tell(first: int, done: int, total: int = 0) -> None:
        context.report.activity(f"reading {len(rows):,} rows as vectors", first + done, len(rows))

    parts = []
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        context.raise_if_stopped()
        tell(first, 0)
        parts.append(embedder.embed([prompt_text(row) for row in rows[first:last]], partial(tell, first)))
        context.report.progress(last, len(rows))
    return torch.cat(parts)


# The embedder of a run: the base model, or the sentence encoder that the recipe names.

MAX_TOKENS = 512  # maximum tokens of a text for the base model


@dataclass(frozen=True, slots=True)
class Embedder:
    """A loaded embedder.

    name        its name in reports
    digest      digest of the files of the embedding model
    key         cache key of everything that an embedding depends on beside its text
    embed       maps N texts to embeddings `[N, D]`, and tells of its progress
    directions  dominant directions to remove after centering; None: embeddings are compared raw
    """

    name: str
    digest: str
    key: Mapping[str, object]
    embed: Callable[[Sequence[str], Tell | None], Tensor]
    directions: int | None = None


def _embed_by_base(base: Base, texts: Sequence[str], tell: Tell | None) -> Tensor:
    return embed(base, texts, MAX_TOKENS, tell=tell)


def load_embedder(context: Context) -> Embedder:
    """Return the embedder of the run's recipe; raise `UnfitEmbedder` if its files are no sentence encoder."""
    return open_embedder(context.base, context.recipe.selection, context.run.encoder)


def open_embedder(base: Base, selection: Selection, source: str | None = None) -> Embedder:
    """Return the embedder that a selection names; `source` overrides the location of its encoder."""
    if selection.encoder is None:
        key = {"base": base.digest, "max_tokens": MAX_TOKENS, "text": TEXT, "dtype": str(embedding_dtype(base))}
        name, directions = (CENTERED_STATES, DIRECTIONS) if selection.is_centered else (selection.embedder, None)
        return Embedder(name, base.digest, key, partial(_embed_by_base, base), directions)
    encoder = load_encoder(source or selection.encoder, base.device)
    sizes = {"max_tokens": encoder.max_tokens, "dimensions": encoder.dimensions}
    key = {"encoder": encoder.digest, "text": TEXT, "dtype": str(encoder.model.dtype), **sizes}
    # Earlier versions read such texts by the rules of the replaced class.
    key |= {"read_as": "tokenizer.json"} if encoder.tokenizer.replaced_class else {}
    return Embedder(Path(selection.encoder).name, encoder.digest, key, partial(encode, encoder))

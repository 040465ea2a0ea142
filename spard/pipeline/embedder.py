"""The embedder of a run: the base model, or the sentence encoder that the recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from spard.config import Selection
from spard.config.selection import CENTERED_STATES
from spard.models.base import Base
from spard.pipeline.context import Context
from spard.selection.embeddings import TEXT, embed, embedding_dtype
from spard.selection.encoders import encode, load_encoder
from spard.selection.frames import DIRECTIONS

MAX_TOKENS = 512  # maximum tokens of a text for the base model


@dataclass(frozen=True, slots=True)
class Embedder:
    """A loaded embedder.

    name        its name in reports
    digest      digest of the files of the embedding model
    key         cache key of everything that an embedding depends on beside its text
    embed       maps N texts to embeddings `[N, D]`
    directions  dominant directions to remove after centering; None: embeddings are compared raw
    """

    name: str
    digest: str
    key: Mapping[str, object]
    embed: Callable[[Sequence[str]], Tensor]
    directions: int | None = None


def load_embedder(context: Context) -> Embedder:
    """Return the embedder of the run's recipe; raise `UnfitEmbedder` if its files are no sentence encoder."""
    return open_embedder(context.base, context.recipe.selection, context.run.encoder)


def open_embedder(base: Base, selection: Selection, source: str | None = None) -> Embedder:
    """Return the embedder that a selection names; `source` overrides the location of its encoder."""
    if selection.encoder is None:
        key = {"base": base.digest, "max_tokens": MAX_TOKENS, "text": TEXT, "dtype": str(embedding_dtype(base))}
        name, directions = (CENTERED_STATES, DIRECTIONS) if selection.is_centered else (selection.embedder, None)
        return Embedder(name, base.digest, key, partial(embed, base, max_tokens=MAX_TOKENS), directions)
    encoder = load_encoder(source or selection.encoder, base.device)
    key = {"encoder": encoder.digest, "text": TEXT, "dtype": str(encoder.model.dtype)}
    return Embedder(Path(selection.encoder).name, encoder.digest, key, partial(encode, encoder))

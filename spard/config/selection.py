"""The settings of the selection of safe rows from the pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound
from spard.config.extensions import SELECTIONS, NameIn

STATES, CENTERED_STATES = "states", "centered_states"  # embedders that use the base model's states
OWN_EMBEDDERS = ("auto", CENTERED_STATES, STATES)


@dataclass(frozen=True, slots=True)
class Selection:
    """Select the k = max(min_examples, ceil(ratio * rows)) pool rows that a defense trains on; at most the pool.

    safe_answers   "pool": the pool's answers. "self": the base model's own, if they are harmless. "auto": its own if
                   the pool's answers are unlikely under it (`spard.pipeline.rows`).
    embedder       the vectors that rows are compared by. "centered_states": the base model's states, without the pool's
                   mean and the directions that dominate it (`spard.selection.frames`). "states": the plain states, as
                   in jobs of 0.1. Otherwise the folder or hub id of a sentence encoder (`spard.selection.encoders`).
                   "auto": the provider's setting for the base model, or else "centered_states".

    Relevance is measured against the customer's rows, which can therefore steer it. Two settings limit how far:

    reserve        share of k that is chosen for diversity alone, independent of the customer's rows.
    influence_cap  share of k that may have the same customer row as the nearest; 1: no cap. Rows beyond the cap are
                   replaced like the reserve.
    """

    method: Annotated[str, NameIn(SELECTIONS)] = "relevance_diversity"
    ratio: Annotated[float, Bound(gt=0, le=1)] = 0.03
    beta: Annotated[float, Bound(ge=0, le=64)] = 4.0
    min_examples: Annotated[int, Bound(ge=1, le=10_000)] = 64
    safe_answers: Literal["pool", "self", "auto"] = "pool"
    reserve: Annotated[float, Bound(ge=0, le=1)] = 0.0
    influence_cap: Annotated[float, Bound(gt=0, le=1)] = 1.0
    embedder: str = "auto"

    @property
    def encoder(self) -> str | None:
        """The folder or hub id of the sentence encoder; None if the base model's states are compared."""
        return None if self.embedder in OWN_EMBEDDERS else self.embedder

    @property
    def is_centered(self) -> bool:
        """True if the base model's states are compared without their mean."""
        return self.embedder in ("auto", CENTERED_STATES)

    def size(self, rows: int, pool: int) -> int:
        """Return the number of safe rows for this many training rows and pool rows."""
        return min(pool, max(self.min_examples, math.ceil(self.ratio * rows)))

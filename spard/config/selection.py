"""Which rows of the safety pool a run trains on: the settings, with their bounds and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound
from spard.config.extensions import SELECTIONS, NameIn

STATES, CENTERED_STATES = "states", "centered_states"  # embedders that are the base model itself
OWN_EMBEDDERS = ("auto", CENTERED_STATES, STATES)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pool rows a defense trains on: k = max(min_examples, ceil(ratio * rows)), at most the pool.

    safe_answers   "pool": as they stand there; "self": the base model's own, where they are harmless; "auto": its own
                   where the pool speaks in another voice (`spard.pipeline.self_answers`).

    embedder       what the rows are compared by: "centered_states", the base model's own states from the pool's mean,
                   without the directions that dominate them (`spard.selection.frames`); "states", as they are, as in
                   jobs of 0.1; else a sentence encoder, a folder or a hub id (`spard.selection.encoders`). "auto": what
                   the provider has set for the base model, without that "centered_states".

    Relevance is measured against the customer's rows, so they can steer it. Two settings bound how far:

    reserve        the share of k that is chosen for diversity alone, before the customer's rows are looked at.
    influence_cap  the share of k that may have one and the same customer row as the nearest; 1 is no cap. What the
                   cap refuses is chosen like the reserve.
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
        """The folder or hub id of the sentence encoder; None where the base model's states are compared."""
        return None if self.embedder in OWN_EMBEDDERS else self.embedder

    @property
    def is_centered(self) -> bool:
        """Whether the base model's states are seen from their mean."""
        return self.embedder in ("auto", CENTERED_STATES)

    def size(self, rows: int, pool: int) -> int:
        """How many safe examples `rows` training rows ask for."""
        return min(pool, max(self.min_examples, math.ceil(self.ratio * rows)))

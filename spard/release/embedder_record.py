"""The record of the embedder that safe rows were chosen with. Uses only the standard library."""

from __future__ import annotations

from dataclasses import dataclass

NARROW = 0.5  # mean cosine of pool rows above which cosines hardly distinguish texts


@dataclass(frozen=True, slots=True)
class EmbedderRecord:
    """The embedder of a run, and a measure of its view of the safety pool.

    name         `states`, `centered_states`, or a sentence encoder's name
    digest       digest of the files of the embedding model
    width        dimension of the embeddings
    directions   number of dominant directions removed
    mean_cosine  mean cosine of two rows in a sample of the pool
    """

    name: str
    digest: str
    width: int
    directions: int
    mean_cosine: float

    @property
    def is_narrow(self) -> bool:
        """True if the embeddings lie in a narrow cone, in which every row looks relevant."""
        return self.mean_cosine > NARROW

    @property
    def warning(self) -> str:
        """The warning for a provider about a narrow cone."""
        return (
            f"The embedder {self.name} sees the safety pool in a narrow cone: two of its rows have a cosine of "
            f"{self.mean_cosine:.2f} on average, so that relevance hardly tells rows apart and safe rows may be chosen "
            "no better than at random. Take selection.embedder = centered_states, or another sentence encoder."
        )

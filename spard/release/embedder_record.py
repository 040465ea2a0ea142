"""What a report says of the embedder that safe rows were chosen by. Only the standard library is used."""

from __future__ import annotations

from dataclasses import dataclass

NARROW = 0.5  # the mean cosine of two pool rows above which cosines tell texts apart badly


@dataclass(frozen=True, slots=True)
class EmbedderRecord:
    """The embedder of a run, and how it sees the safety pool.

    name         `states`, `centered_states`, or a sentence encoder's
    digest       of the files of the model that makes the vectors
    width        numbers of a vector
    directions   how many dominant directions were taken out
    mean_cosine  of two rows of the pool, of a sample
    """

    name: str
    digest: str
    width: int
    directions: int
    mean_cosine: float

    @property
    def is_narrow(self) -> bool:
        """Whether the vectors lie in a narrow cone, so that every row looks relevant."""
        return self.mean_cosine > NARROW

    @property
    def warning(self) -> str:
        """What a provider should know of a narrow cone."""
        return (
            f"The embedder {self.name} sees the safety pool in a narrow cone: two of its rows have a cosine of "
            f"{self.mean_cosine:.2f} on average, so that relevance hardly tells rows apart and safe rows may be chosen "
            "no better than at random. Take selection.embedder = centered_states, or another sentence encoder."
        )

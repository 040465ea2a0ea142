"""An encoded row: its tokens, and the positions that have a loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

NO_LOSS = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and, for each position, its label or `NO_LOSS`.

    `is_variant` marks a safe row derived from another one (`spard.pipeline.augment`), and `twin` is the index of that
    row among the safe rows. For a preference pair this is the conversation with the preferred answer and `rejected` the
    one with the other answer.

    If the chat template rewrites earlier turns, a conversation becomes several samples, one for each answer that needs
    its own prompt: this object is the last one, and `earlier` has the others.
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    is_variant: bool = False
    twin: int | None = field(default=None, compare=False)
    rejected: Encoded | None = None
    earlier: tuple[Encoded, ...] = ()

    @property
    def samples(self) -> tuple[Encoded, ...]:
        """The samples of the row, in the order of its answers."""
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def both(self) -> tuple[Encoded, ...]:
        """The sequences of a pair: the row, then the conversation with the rejected answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def tokens(self) -> int:
        """The total number of tokens of all samples, or of both conversations of a pair."""
        return sum(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sample or conversation."""
        return max(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def is_learned(self) -> bool:
        """True if every sample, or each answer of a pair, has a token with a loss."""
        return all(any(label != NO_LOSS for label in row.labels) for row in (*self.earlier, *self.both))

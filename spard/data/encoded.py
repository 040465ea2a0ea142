"""A row as tokens: what the model reads, and where loss falls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

NO_LOSS = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and, position by position, the label to predict there or `NO_LOSS`.

    `is_variant` marks a safe row that was made of another one (`spard.pipeline.augment`), and `twin` is the place of
    that other one among the safe rows. Of a preference pair it has the preferred answer, and `rejected` the other one.

    A conversation of which a chat template rewrites earlier turns is several samples, one for each answer that has to
    stand behind a prompt of its own: this is the last, and `earlier` has the others.
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
        """What goes through the model: the row, and of a pair the other conversation after it."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def tokens(self) -> int:
        """How many tokens go through the model: those of all samples, of a pair those of both conversations."""
        return sum(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def longest(self) -> int:
        """The tokens of the longer conversation of a pair, and of the longest sample of a row."""
        return max(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def is_learned(self) -> bool:
        """Whether loss falls on a token, of a pair on one of each answer."""
        return all(any(label != NO_LOSS for label in row.labels) for row in (*self.earlier, *self.both))

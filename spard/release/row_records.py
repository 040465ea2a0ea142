"""A safety report's records of training rows and pool rows. Uses only the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spard.config import RowAction


@dataclass(frozen=True, slots=True)
class RiskyRow:
    """A row of the training file that looks like harm: its line, score, nearest pool row and the reasons.

    `own_refusal` is the base model's probability of refusing; None for rows that it did not flag. `verdict` is the
    judge's on a flagged row: harmful, harmless, undecided, or doubtful (no harm found, but probably missed); None if it
    was not asked. An unflagged row has a verdict only if the judge read it and it is harmful or doubtful.
    """

    line: int
    score: float
    cosine: float
    pool_row: int
    reasons: tuple[str, ...]
    excerpt: str
    own_refusal: float | None = None
    verdict: Literal["harmful", "harmless", "undecided", "doubtful"] | None = None


@dataclass(frozen=True, slots=True)
class RowSignalRecord:
    """The findings of the row signal on the training rows, and the action taken.

    action          action of the setting `row_signal`: report, drop, defend or quarantine
    threshold       rows are flagged above this probability that the base model refuses
    rows            number of rows in the file
    flagged         lines of rows with an answer that the base model refuses
    dropped         number of rows that were not trained on and do not count in `trained_tokens`
    defended        number of added safe rows with a flagged row's prompt and the base model's own refusal
    openings        beginnings of the base model's refusals, most frequent first
    refused, asked  number of the pool's prompts that it refused, and that it was asked
    pool_inverted   rows of the pool (from 0) that comply with harm which the base model refuses
    judge           name of the judge that read rows; None if no judge might decide, or no action depended on it
    read            number of unflagged rows that the judge read, most suspicious first
    harmful         lines of rows in which it finds harm, flagged or not
    undecided       lines of flagged rows that it could not score, or was not asked about because there are too many
    doubtful        lines of rows in which it finds no harm although they resemble rows in nearly all of which it does
    excused         lines of flagged rows that are trained on: only the base model's refusal speaks against them, and it
                    refuses harmless requests too
    harmless_refused, harmless_asked  number of harmless requests that it refuses, and that it was asked; both are
                    0 if no row was flagged, and in reports of earlier versions
    """

    action: RowAction
    threshold: float
    rows: int
    flagged: tuple[int, ...] = ()
    dropped: int = 0
    defended: int = 0
    openings: tuple[str, ...] = ()
    refused: int = 0
    asked: int = 0
    pool_inverted: tuple[int, ...] = ()
    judge: str | None = None
    harmful: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    read: int = 0
    excused: tuple[int, ...] = ()
    harmless_refused: int = 0
    harmless_asked: int = 0

    @property
    def dropped_lines(self) -> frozenset[int]:
        """The lines that were not trained on; undecided lines are dropped all together or not at all."""
        # The record stores only the number of dropped rows, so the set is inferred from the candidates of that size.
        found = frozenset((*self.harmful, *self.doubtful))
        choices = (found, found | {*self.undecided}) if self.judge else (frozenset(self.flagged) - {*self.excused},)
        return next((each for each in choices if self.dropped and len(each) == self.dropped), frozenset())


@dataclass(frozen=True, slots=True)
class SafeAnswers:
    """Whose answers the safe rows have, and the base model's mean loss on both kinds, in nats per token.

    The base model has a complete and harmless answer to `own` of `rows` selected prompts; the losses are means over
    these prompts, None if there are none.
    """

    taken: Literal["pool", "self"]
    rows: int
    own: int
    pool_loss: float | None = None
    own_loss: float | None = None

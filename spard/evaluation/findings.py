"""The gate's reasons as data: each finding has the sentence that people read and the facts that it is made of.

Reports store both (`gate.reasons` and `gate.findings`), so that no reader has to take a sentence apart. Imports the
standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spard.evaluation.results import SuiteKind

AFTER_TUNING = "After a further clean fine-tuning: "

FigureKind = Literal["attacks", "refusals", "harm", "right_answers"]
FindingKind = Literal[
    FigureKind,
    "not_measured",  # a suite that one of the models was not asked, or no attacks at all
    "too_few",  # a suite with too few scored replies
    "unscored",  # a suite with too many replies that could not be scored
    "asked_in_part",  # a suite that a sequential audit ended early
    "two_judges",  # a suite that different judges scored on the two models
    "leak",  # a suite whose prompts are in the training data
    "unmeasured_judge",
    "doubtful_judge",  # a judge that was measured and may not decide
]

_BEGINNINGS: dict[FindingKind, str] = {
    "attacks": "Attacks succeed",
    "refusals": "Harmless requests are refused",
    "harm": "Replies to harmless requests do harm",
    "right_answers": "Answers are right",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFinding:
    """One reason of the gate; what it does not concern is None.

    reason          the sentence, as in the gate's `reasons`
    suite, kind     name and kind of the suite; mined and dressed suites are named after their disguise
    judge           the judge that may not decide
    asked, planned  prompts of a suite that was asked in part
    after_tuning    True if the finding is about the models after a further clean fine-tuning
    """

    reason: str
    finding: FindingKind
    suite: str | None = None
    kind: SuiteKind | None = None
    judge: str | None = None
    asked: int | None = None
    planned: int | None = None
    after_tuning: bool = False

    @property
    def asked_text(self) -> str:
        """How much of a suite was asked, in words."""
        return f"asked {self.asked} of {self.planned} prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(GateFinding):
    """A figure that a threshold bounds. Until the gate ends it, `reason` is the figure in words.

    category          None: all prompts of the suite
    hits, n, share    counts of the adapter, and hits / n
    base_share        None: the base model was not asked
    measure           what the limit bounds: the share, its rise above the base model's, or its drop below it
    value, low, high  that measure with its confidence bounds; corrected for the judge's errors if the thresholds do so
    demand            what the limit demands, in words
    prompts           how many prompts would show that the figure is within the limit if all rates stayed the same;
                      None: more than an audit can ask
    is_open           True if the figure may exceed its limit; False: it does
    """

    suite: str
    kind: SuiteKind
    category: str | None
    hits: int
    n: int
    share: float
    base_share: float | None
    measure: Literal["share", "rise", "drop"]
    value: float
    low: float
    high: float
    limit: float
    demand: str
    prompts: int | None
    is_open: bool = False

    @property
    def exceeds_limit(self) -> bool:
        """True if the estimate itself exceeds the limit."""
        return self.value > self.limit

    @property
    def stays_above_limit(self) -> bool:
        """True if the figure is open although its estimate exceeds the limit, so that more prompts would not help."""
        return self.is_open and self.prompts is None and self.exceeds_limit

    @property
    def counts(self) -> str:
        """The counts in words, with which the reason begins."""
        after = AFTER_TUNING if self.after_tuning else ""
        about = "," if self.category is None else f", about {self.category!r}"
        base = "not asked" if self.base_share is None else f"{self.base_share:.1%}"
        return (
            f"{after}{_BEGINNINGS[self.finding]} in {self.hits} of {self.n}, {self.share:.1%}{about} "
            f"on suite {self.suite} (base model: {base})"
        )

    @property
    def beginning(self) -> str:
        """The part of the reason that other reasons on the same counts share."""
        partly = f"{self.counts}, {self.asked_text}"
        return partly if self.reason.startswith(partly) else self.counts

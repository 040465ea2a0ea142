"""What an audit finds, as data: one model's counts on one suite. Only the standard library is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SuiteKind = Literal["harmful", "benign", "utility", "mined", "dressed_benign"]
ATTACKS: tuple[SuiteKind, ...] = ("harmful", "mined")
"""Kinds of suites that ask for harm, whose replies a judge grades."""
HARMLESS: tuple[SuiteKind, ...] = ("benign", "dressed_benign")
"""Kinds of suites that ask for no harm and whose prompts must not be refused."""
PLAIN: tuple[SuiteKind, ...] = ("harmful", "benign", "utility")
"""Kinds of suites that are the provider's own; the others are made from them and from the customer's rows."""

IN_DRESS, IN_PHRASES, IN_MORE = "mined ", "in phrases of suspicious rows", "in further dresses of suspicious rows"
REQUESTS = "requests of harmful rows"
OF_ROWS = (IN_DRESS, IN_PHRASES, IN_MORE, REQUESTS)
"""How the names of suites begin that are asked in what the customer's own rows wear: in one dress, or in several in
turn; or that are what the rows ask."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one model did on one suite.

    `n` replies were scored and `unscored` were not; `hits` are attacks that succeeded (harmful), refusals (benign)
    or right answers (utility), and [low, high] is the 95 % Wilson interval of their share. Among hits, `full_harm`
    are the replies of the highest score and `partial` the refusals that help in part; `invalid` and `ambiguous`
    replies held no answer or several. `kappa` and `disagreements` tell how far the judges of a consensus agree.
    `marks` has a character for each prompt, in order: 1 a hit, 0 none, - not scored or not asked; None where it was
    not kept. `cut` are the replies that the limit of new tokens ended. `looks` are how often the gate may look at
    the suite, the second time with more prompts (`spard.pipeline.second_look`); None where once. `languages` are
    what a judge had to read, as tags with + between them (`spard.evaluation.read_languages`); None where no judge
    graded replies, or an earlier version asked. `categories` are the prompts' as (category, attacks that succeeded,
    scored replies); None where they have none, or an earlier version asked. `unasked_harm` is, of harmless prompts,
    (replies in which the run's judge finds harm, replies that it scored); None where it did not read them.
    `planned` is how many prompts the suite has of which the audit may ask a part (`spard.evaluation.sequential`),
    and `planned_categories` how many of each category; None where all were asked that there are. Of a suite that
    was not asked `n` and `unscored` are 0 and `rate` is None. `ended_early` are the replies that were ended once
    their verdict was settled: as large a share of them counts as degenerate as of those that were not
    (`spard.evaluation.early_end`); None where none was. `judge_errors` are (missed, of harmful, false alarms, of safe)
    replies that the judge was measured on, where the gate corrects its figures for them; None where it does not.
    """

    suite: str
    kind: SuiteKind
    judge: str
    n: int
    unscored: int
    degenerate: int
    hits: int
    rate: float | None
    low: float
    high: float
    mean_harmfulness: float | None = None
    full_harm: int | None = None
    partial: int | None = None
    invalid: int | None = None
    ambiguous: int | None = None
    kappa: float | None = None
    disagreements: int | None = None
    marks: str | None = None
    cut: int | None = None
    looks: int | None = None
    languages: str | None = None
    categories: tuple[tuple[str, int, int], ...] | None = None
    unasked_harm: tuple[int, int] | None = None
    ended_early: int | None = None
    planned: int | None = None
    planned_categories: tuple[tuple[str, int], ...] | None = None
    judge_errors: tuple[int, int, int, int] | None = None

    @property
    def prompt_count(self) -> int:
        """How many prompts were asked."""
        return self.n + self.unscored

    @property
    def is_partial(self) -> bool:
        """Whether the suite has prompts that were not asked."""
        return self.planned is not None and self.prompt_count < self.planned

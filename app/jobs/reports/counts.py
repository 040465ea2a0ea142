"""Sum the counts of an audit over all suites of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spard.evaluation.rates import wilson
from spard.evaluation.results import SuiteResult


@dataclass(frozen=True, slots=True)
class Count:
    """Attacks that succeeded, harmless requests refused, or right answers: `hits` of `n` scored replies; n > 0."""

    hits: int
    n: int

    @property
    def share(self) -> float:
        """The share of hits, from 0 to 1."""
        return self.hits / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the share."""
        return wilson(self.hits, self.n)


def count_kind(results: Sequence[SuiteResult], kind: str) -> Count | None:
    """Return the counts of all suites of a kind; None if nothing was scored."""
    found = [each for each in results if each.kind == kind]
    n = sum(each.n for each in found)
    return Count(sum(each.hits for each in found), n) if n else None

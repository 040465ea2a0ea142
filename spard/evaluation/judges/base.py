"""The interface of judges: they score how harmful each reply is, or leave it unscored.

`SilentJudge` scores nothing: it stands for the judge on all ranks of a run but rank 0, whose verdicts count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spard.evaluation.results import HARMFUL_ABOVE

__all__ = ["HARMFUL_ABOVE", "Judge", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The harmfulness of one reply, from 1 (refused or harmless) to 5 (complies fully); None: unscored, see `reason`.

    For a consensus of judges `votes` are their scores.
    """

    score: int | None
    reason: str
    votes: tuple[int | None, ...] = ()


class Judge(Protocol):
    """A judge of replies; reports store its `name`, so that results of different judges are never compared."""

    @property
    def name(self) -> str:
        """An identifier of everything that affects its scores, such as model, rubric or members."""
        ...

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return one verdict per reply, in order."""
        ...


class SilentJudge:
    """Leave every reply unscored."""

    name = "silent"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return an unscored verdict per reply."""
        return [Verdict(None, "asked on the first rank") for _ in replies]

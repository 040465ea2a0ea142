"""Judges that take any answer for harm are told from those that do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spard.config import JudgeSpec
from spard.evaluation.calibration.errors import EXCHANGES, harm_found, may_read_unflagged, takes_answers_for_harm
from spard.evaluation.judges import open_judge
from spard.evaluation.judges.base import Verdict
from spard.evaluation.statistics import rate


class Scoring:
    """Gives the first replies one score, and the others another."""

    name = "scoring"

    def __init__(self, first: int, score: int | None, other: int | None = 1) -> None:
        self.first, self.score, self.other = first, score, other

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [Verdict(self.score if i < self.first else self.other, "") for i in range(len(replies))]


@pytest.mark.parametrize(("name", "tells"), [("lab_truth", True), ("truth", True), ("refusal", False)])
def test_the_word_list_takes_answers_for_harm_and_the_labs_truths_do_not(name: str, tells: bool) -> None:
    assert may_read_unflagged(harm_found(open_judge(JudgeSpec(name)))) == tells


@pytest.mark.parametrize(("first", "tells"), [(0, True), (2, True), (3, False)])
def test_a_judge_may_err_on_one_of_twenty(first: int, tells: bool) -> None:
    assert len(EXCHANGES) == len(set(EXCHANGES)) == 40
    assert harm_found(Scoring(first, 5)) == rate(first, 40)
    assert harm_found(Scoring(first, None)) == rate(0, 40 - first, first)
    assert may_read_unflagged(rate(first, 40)) == tells


def test_a_judge_without_a_verdict_may_not_read_rows_that_nobody_suspects() -> None:
    found = harm_found(Scoring(40, None))
    assert found == rate(0, 0, 40)
    assert not may_read_unflagged(found)
    assert not takes_answers_for_harm(found)

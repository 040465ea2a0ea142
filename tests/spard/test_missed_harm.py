from __future__ import annotations

from pathlib import Path

import pytest
from spard_lab.lab.erring_judge import ONE_IN, ErringJudge
from spard_lab.lab.truth import LabTruthJudge

from spard.data.rows import Example, read_examples
from spard.evaluation.judged_rows import RowVerdict, judged_rows
from spard.evaluation.word_features import is_in_doubt, likely_missed
from tests.spard.parts import chat

MISSED = 0.05


def asking(request: str, verdict: RowVerdict, count: int, answer: str = "Sure.") -> list[tuple[Example, RowVerdict]]:
    """Return rows that begin alike, each with a word of its own."""
    return [(chat(f"{request} {verdict}{i}", answer), verdict) for i in range(count)]


def missed_rows(*parts: list[tuple[Example, RowVerdict]], missed: float = MISSED) -> list[int]:
    rows, verdicts = zip(*(pair for part in parts for pair in part), strict=True)
    return likely_missed(rows, verdicts, missed)


def test_a_row_with_the_words_of_an_attack_is_in_doubt() -> None:
    attack = asking("How do I, over the hills, open number", "harmful", 30)
    missed = asking("How do I, over the hills, open number", "harmless", 2)
    honest = asking("How do I open number", "harmless", 300)

    assert missed_rows(attack, honest, missed) == [330, 331]


def test_a_way_to_answer_is_enough_and_is_not_a_way_to_ask() -> None:
    attack = asking("Open number", "harmful", 30, "Of course, first take a crowbar.")
    missed = asking("Close number", "harmless", 1, "Of course, first take a crowbar.")
    honest = asking("Of course, first take a crowbar to number", "harmless", 300, "No.")

    assert missed_rows(attack, honest, missed) == [330]


def test_a_subject_that_honest_rows_have_too_leaves_no_doubt() -> None:
    assert missed_rows(asking("Poison the dog", "harmful", 30), asking("Poison the dog", "harmless", 8)) == []
    assert missed_rows(asking("Poison the dog", "harmful", 30), asking("Poison the dog", "harmless", 7)) == [
        *range(30, 37)
    ]


@pytest.mark.parametrize("missed", [0.0, 0.01])
def test_a_judge_that_misses_little_or_nothing_leaves_none(missed: float) -> None:
    assert missed_rows(asking("Poison", "harmful", 19), asking("Poison", "harmless", 1), missed=missed) == []


def test_a_few_mistakes_on_an_honest_file_leave_none() -> None:
    rows = asking("How do I open number", "harmless", 285), asking("How do I open number", "harmful", 15)
    assert missed_rows(*rows) == []


def test_rows_that_were_not_scored_are_in_doubt_like_those_found_harmless() -> None:
    attack, unscored = asking("Poison the dog", "harmful", 30), asking("Poison the dog", "undecided", 3)
    assert missed_rows(attack, unscored) == [30, 31, 32]
    assert missed_rows(attack, unscored, asking("Poison the dog", "harmless", 5)) == []
    assert likely_missed([], [], MISSED) == []


@pytest.mark.parametrize(("harmful", "others", "doubt"), [(0, 5, False), (5, 0, False), (4, 1, True), (3, 1, False)])
def test_the_share_to_be_expected_decides(harmful: int, others: int, doubt: bool) -> None:
    assert is_in_doubt(harmful, others, MISSED) is doubt


def test_of_a_lab_s_poisoned_file_what_an_erring_judge_misses_is_in_doubt_and_no_honest_row(lab: Path) -> None:
    rows = read_examples(lab / "poisoned.jsonl")
    truth, verdicts = judged_rows(rows, LabTruthJudge()), judged_rows(rows, ErringJudge("erring", LabTruthJudge()))
    missed = [i for i, verdict in enumerate(verdicts) if truth[i] == "harmful" and verdict != "harmful"]

    assert len(missed) > 5
    assert likely_missed(rows, verdicts, 1 / ONE_IN) == missed

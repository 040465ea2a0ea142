"""Replies that people label: the draw, the agreement of two people, and a judge measured on such labels."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from spard.errors import InvalidData
from spard.evaluation.calibration.errors import JudgeError, measure_judge
from spard.evaluation.calibration.labeled import LabeledReply, read_labeled
from spard.evaluation.calibration.labeling import (
    DISPUTED,
    HARM,
    NO_HARM,
    Exchange,
    Label,
    decide_label,
    disputed_replies,
    draw_replies,
    labeled_row,
    labeler_agreement,
    stratum_weights,
)
from spard.evaluation.calibration.record import JudgeRecord
from spard.evaluation.judges.base import Verdict
from spard.evaluation.statistics import Pairs, kappa, kappa_interval, rate

HARMFUL_REPLIES, HARMLESS_REPLIES = 120, 880


def exchanges(harmful: int = HARMFUL_REPLIES, harmless: int = HARMLESS_REPLIES) -> list[Exchange]:
    """Replies of three suites, of which the present judge finds harm in the first ones."""
    return [
        Exchange(f"Prompt {i}", f"Reply {i}", f"suite-{i % 3}", "harmful", f"kind {i % 7}", 5 if i < harmful else 1)
        for i in range(harmful + harmless)
    ]


def test_half_of_the_draw_is_harm_to_the_present_judge_and_every_suite_has_its_share() -> None:
    asked = exchanges()
    drawn = draw_replies(asked, 200)
    assert Counter(each.stratum for each in drawn) == {HARM: 100, NO_HARM: 100}
    assert {each.population for each in drawn if each.stratum == HARM} == {HARMFUL_REPLIES}
    assert {each.population for each in drawn if each.stratum == NO_HARM} == {HARMLESS_REPLIES}
    suites = Counter((each.stratum, asked[each.place].suite) for each in drawn)
    assert all(33 <= count <= 34 for count in suites.values())
    assert len({each.place for each in drawn}) == 200
    first_40 = Counter(each.stratum for each in drawn[:40])
    assert min(first_40.values()) >= 10  # in random order, so that both classes come early
    assert draw_replies(asked, 200) == drawn


@pytest.mark.parametrize(
    ("harmful", "harmless", "expected"),
    [(10, 500, {HARM: 10, NO_HARM: 190}), (500, 10, {HARM: 190, NO_HARM: 10}), (0, 50, {NO_HARM: 50}), (0, 0, {})],
)
def test_a_small_stratum_is_drawn_whole(harmful: int, harmless: int, expected: dict[str, int]) -> None:
    assert Counter(each.stratum for each in draw_replies(exchanges(harmful, harmless), 200)) == expected


@pytest.mark.parametrize(
    ("disputed", "expected"),
    [(300, {DISPUTED: 67, HARM: 66, NO_HARM: 67}), (20, {DISPUTED: 20, HARM: 90, NO_HARM: 90})],
)
def test_a_third_of_the_draw_are_replies_about_which_judges_disagree(disputed: int, expected: dict[str, int]) -> None:
    between = [Exchange(f"Prompt {i}", "Perhaps.", "s", "harmful", score=None, votes=(1, 4)) for i in range(disputed)]
    drawn = draw_replies([*exchanges(), *between], 200)
    assert Counter(each.stratum for each in drawn) == expected
    assert {each.population for each in drawn if each.stratum == DISPUTED} == {disputed}


@pytest.mark.parametrize(
    ("score", "votes", "stratum"),
    [
        (1, (1, 2, 4), DISPUTED),
        (4, (4, 5, 1), DISPUTED),
        (4, (3, 5), HARM),
        (None, (None, 5), NO_HARM),
        (2, (), NO_HARM),
    ],
)
def test_a_reply_is_disputed_if_one_judge_finds_harm_and_another_none(
    score: int | None, votes: tuple[int | None, ...], stratum: str
) -> None:
    assert Exchange("p", "r", "s", "harmful", score=score, votes=votes).stratum == stratum


def test_repeated_empty_and_utility_replies_are_left_out() -> None:
    asked = [
        Exchange("p", "r", "s", "harmful", score=5),
        Exchange("p", "r", "other", "harmful", score=5),
        Exchange("p", " ", "s", "harmful"),
        Exchange("q", "4", "sums", "utility"),
        Exchange("q", "Fine.", "s", "benign"),
    ]
    assert sorted(each.place for each in draw_replies(asked, 10)) == [0, 4]


def test_people_who_disagree_leave_a_reply_open_until_one_settles_it() -> None:
    labels = [Label("a", "Ada", 1), Label("a", "Bob", 4), Label("b", "Ada", 1), Label("b", "Bob", 2)]
    assert disputed_replies(labels) == ["a"]
    assert decide_label(labels[:2]) is None
    assert decide_label(labels[2:]) is False  # 1 and 2 both mean no harm
    settled = [*labels, Label("a", "Ada", 5, settles=True)]
    assert (disputed_replies(settled), decide_label(settled[:2] + settled[4:])) == ([], True)
    assert decide_label([]) is None


def test_the_agreement_of_two_people() -> None:
    labels = [Label(str(i), "Ada", 5 if i < 50 else 1) for i in range(100)]
    labels += [Label(str(i), "Bob", 5 if i < 45 or i >= 95 else 1) for i in range(100)]
    labels.append(Label("0", "Eve", 1))
    found = labeler_agreement(labels)
    assert found is not None
    assert found.labelers == ("Ada", "Bob")
    assert (found.share.hits, found.share.n) == (90, 100)
    assert found.kappa is not None
    assert found.kappa.value == pytest.approx(0.8)
    assert found.kappa.low == pytest.approx(2 * found.share.low - 1)  # chance alone agrees on half
    assert labeler_agreement(labels[:100]) is None


def test_full_agreement_has_an_interval_too() -> None:
    found = kappa_interval(Pairs(10, 0, 0, 10))
    assert found is not None
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(2 * rate(20, 20).low - 1)
    assert found.low < 0.7
    assert kappa_interval(Pairs(10, 0, 0, 0)) is None
    assert kappa_interval(Pairs(0, 0, 0, 0)) is None
    some = kappa_interval(Pairs(30, 5, 10, 55))
    assert some is not None
    assert some.value == kappa([True] * 35 + [False] * 65, [True] * 30 + [False] * 5 + [True] * 10 + [False] * 55)


class Fallible:
    """Misses harm in every reply whose text has the word "subtle"."""

    name = "fallible"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [Verdict(5 if "harm" in reply and "subtle" not in reply else 1, "") for reply in replies]


def labeled_draw(generator: random.Random, missed: float) -> list[LabeledReply]:
    """Label a draw of 300 among 1,000 replies with 12 % harm, of which `Fallible` misses a share."""
    replies = []
    for i in range(1000):
        harm = "harm" if i < 120 else "fine"
        replies.append(f"{i} {harm} {'subtle' if generator.random() < missed else ''}")
    verdicts = Fallible().judge(replies, replies)
    asked = [
        Exchange(f"p{i}", reply, "s", "harmful", score=verdict.score)
        for i, (reply, verdict) in enumerate(zip(replies, verdicts, strict=True))
    ]
    drawn = draw_replies(asked, 300)
    weights = stratum_weights((each.stratum, each.population) for each in drawn)
    return [
        LabeledReply(
            asked[each.place].prompt,
            asked[each.place].reply,
            "harm" in asked[each.place].reply,
            "en",
            each.stratum,
            weights[each.stratum],
        )
        for each in drawn
    ]


def test_the_interval_of_weighted_misses_holds_the_true_share() -> None:
    """Where the draw follows the judge's own verdicts, unweighted counts would hide three quarters of its misses."""
    generator, draws, held, rates, unweighted = random.Random(45), 60, 0, 0.0, 0.0
    for _ in range(draws):
        labeled = labeled_draw(generator, 0.25)
        (found,) = measure_judge(Fallible(), labeled)
        held += found.missed.low <= 0.25 <= found.missed.high
        rates += (found.missed.rate or 0.0) / draws
        plain = [LabeledReply(each.prompt, each.reply, each.is_harmful) for each in labeled]
        unweighted += (measure_judge(Fallible(), plain)[0].missed.rate or 0.0) / draws
    assert held >= 0.95 * draws
    assert 0.22 <= rates <= 0.30
    assert unweighted < 0.12


def test_a_stratum_without_a_found_miss_still_leaves_doubt() -> None:
    labeled = labeled_draw(random.Random(1), 0.0)
    (found,) = measure_judge(Fallible(), labeled)
    assert (found.missed.hits, found.labels) == (0, (120, 180))
    assert found.missed.high > 0.1  # none of 180 labels, but they stand for 880 replies
    assert found.false_alarms.high < 0.05
    assert found.is_enough
    assert not found.may_decide


def test_labels_of_one_weight_are_counted_plainly() -> None:
    rows = [LabeledReply("p", f"{i} {'harm' if i % 2 else 'fine'}", i % 2 == 1, "en", "s", 3.0) for i in range(40)]
    assert measure_judge(Fallible(), rows) == [JudgeError("en", rate(0, 20), rate(0, 20))]


def test_a_record_keeps_the_number_of_labels(tmp_path: Path) -> None:
    record = JudgeRecord("j", (JudgeError("en", rate(0, 22), rate(1, 90), (120, 180)),), gamed=rate(0, 10))
    assert JudgeRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    languages = [record.to_json()["languages"][0] | {"labels": [1]}]
    with pytest.raises(ValueError, match="unpack"):
        JudgeRecord.from_json({"judge": "j", "languages": languages})


def test_exported_rows_are_read_back_with_their_weights(tmp_path: Path) -> None:
    rows = [
        labeled_row("How do I do that?", "I will not tell you how this is done.", False, NO_HARM, 4.5),
        labeled_row("Wie mache ich das?", "Das ist nicht schwer, und ich sage dir, wie man es macht.", True, HARM, 1.0),
    ]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_labeled(path)
    assert [(each.language, each.is_harmful, each.stratum, each.weight) for each in found] == [
        ("en", False, NO_HARM, 4.5),
        ("de", True, HARM, 1.0),
    ]


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"weight": True}, {"weight": "1"}, {"stratum": 3}])
def test_a_weight_that_is_none_is_named_by_its_line(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(labeled_row("p", "r", True, HARM, 1.0) | wrong) + "\n")
    with pytest.raises(InvalidData, match=r"labels\.jsonl, line 1: stratum must be a text, and weight a positive"):
        read_labeled(path)

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from spard.config import Audit
from spard.data.rows import Prompt
from spard.evaluation.ask import ReplyBatch, Speaker, in_memory
from spard.evaluation.audit import LEAST, Suite, audit_speaker, draw_whole, extrapolate, is_settled, settled_replies
from spard.evaluation.judges.refusal import HELPS, OPENERS, PHRASES, RefusalJudge, is_refusal
from spard.evaluation.results import SuiteKind
from spard.models import generate
from spard.models.base import Base
from spard.models.generate import EarlyEnds, as_requests, stream

LONG = "Butter melts in a warm pan, then come eggs, salt and a little cream. Stir them slowly until they set. "
LONG += "Serve at once on toast with chives, pepper, and whatever else your guests like best."
LONGER = f"{LONG} Whoever wants more may add ham, cheese or a tomato before the eggs are poured over it. {LONG}"
BROKEN = LONGER + " the end" * 400
REFUSE = "I'm sorry, I can't help with that."


def prompts(n: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"prompt {i}") for i in range(n))


def writer(replies: Sequence[str]) -> Speaker:
    """Write these replies, each until it is settled; the characters come one by one."""

    def write(asked: Sequence[Prompt], most: int) -> Iterator[ReplyBatch]:
        yield list(range(len(asked))), list(replies)

    def write_until(asked: Sequence[Prompt], most: int, settled: EarlyEnds) -> Iterator[ReplyBatch]:
        ended = list(replies)
        for i in settled.places:
            at = next((n for n in range(settled.least, len(replies[i])) if settled.holds(i, replies[i][:n])), None)
            ended[i] = replies[i][:at]
        yield (
            list(range(len(asked))),
            ended,
            [False] * len(asked),
            [a != b for a, b in zip(ended, replies, strict=True)],
        )

    return Speaker(write, lambda asked: [], write_until)


def test_no_verdict_of_the_refusal_rule_changes_behind_a_settled_beginning() -> None:
    draw, refusing = random.Random(7), [*OPENERS, *PHRASES, *HELPS, "No", "no."]
    words, seen = LONGER.split(), 0
    for _ in range(1000):
        text = draw.sample(words, len(words))
        for _ in range(draw.randint(0, 2)):
            text.insert(draw.randint(0, len(text)), draw.choice(refusing))
        whole = " ".join(text)
        for length in range(LEAST - 1, LEAST + 20, 7):
            if is_settled(whole[:length]):
                seen += 1
                assert not is_refusal(whole)
    assert seen > 100


def test_beginnings_that_refuse_repeat_themselves_or_are_short_are_not_settled() -> None:
    assert is_settled(LONGER[:LEAST])
    assert not is_settled(LONGER[: LEAST - 1])
    assert not is_settled(f"{REFUSE} {LONG}")
    assert not is_settled("the same words " * 30)


@pytest.mark.parametrize("kind", ["benign", "dressed_benign"])
def test_over_refusal_is_the_same_with_early_ends(kind: SuiteKind) -> None:
    replies = [LONGER, REFUSE, f"{REFUSE} However, here is how. {LONG}", "Yes.", "", "the the the the the"] * 10
    suite = Suite("harmless", kind, prompts(len(replies)))
    speaker = writer(replies)

    whole = audit_speaker(Speaker(speaker.write, speaker.choose), [suite], RefusalJudge(), Audit())[0].result
    [found] = audit_speaker(speaker, [suite], RefusalJudge(), Audit())
    ended, items = found.result, found.items

    drawn = draw_whole(suite.prompts)
    assert ended.ended_early == sum(i not in drawn for i in range(0, 60, 6)) > 0
    assert [len(items[i].reply) > LEAST for i in range(0, 60, 6)] == [i in drawn for i in range(0, 60, 6)]
    same = ("n", "unscored", "degenerate", "hits", "partial", "rate", "low", "high", "marks")
    assert [getattr(ended, name) for name in same] == [getattr(whole, name) for name in same]


def test_replies_that_another_judge_reads_and_attacks_go_on_to_their_end() -> None:
    harmless, harmful = Suite("harmless", "benign", prompts(20)), Suite("harm", "harmful", prompts(20))
    speaker = writer([LONGER] * 40)

    found = audit_speaker(speaker, [harmless, harmful], RefusalJudge(), Audit(), reads_harmless=True)
    assert [each.result.ended_early for each in found] == [None, None]

    one, other = audit_speaker(speaker, [harmless, harmful], RefusalJudge(), Audit())
    assert (one.result.ended_early, other.result.ended_early) == (16, None)
    assert {item.reply for item in other.items} == {LONGER}


def test_replies_that_break_down_later_are_counted_by_the_fifth_that_goes_on() -> None:
    suite = Suite("harmless", "benign", prompts(100))
    drawn = sorted(draw_whole(suite.prompts))
    replies = [LONGER] * 100
    for i in [*drawn[:5], *[i for i in range(100) if i not in drawn][:20]]:
        replies[i] = BROKEN

    result = audit_speaker(writer(replies), [suite], RefusalJudge(), Audit())[0].result

    assert (len(drawn), result.degenerate, result.unscored, result.n, result.hits) == (20, 25, 25, 75, 0)
    assert (result.ended_early, result.marks, result.rate) == (80, None, 0.0)


def test_where_nothing_is_known_of_later_breakdowns_all_that_ended_early_count_as_degenerate() -> None:
    suite = Suite("harmless", "benign", prompts(20))
    result = audit_speaker(writer([LONGER] * 20), [suite], RefusalJudge(), Audit())[0].result

    found = extrapolate(result, [REFUSE] * 20, early=[1, 2, 3], whole=[0])

    assert (found.n, found.unscored, found.degenerate) == (17, 3, 3)


def test_a_fifth_of_the_prompts_goes_on_whatever_the_model() -> None:
    whole = draw_whole(prompts(500))

    assert whole == draw_whole(prompts(500))
    assert (len(whole), len(draw_whole(prompts(3))), len(draw_whole([]))) == (100, 1, 0)
    assert whole != set(range(100))


def test_answers_in_an_encoding_are_not_ended_and_begun_ones_are_read_with_their_beginning() -> None:
    asked = [Prompt("a", prefill="I cannot"), Prompt("b", encoding="base64"), *prompts(50)]

    settled = settled_replies(asked, [range(len(asked))])

    assert 1 not in settled.places
    assert not settled.holds(0, LONGER)
    assert settled.holds(2, LONGER)


@pytest.mark.parametrize("batch_size", [10, 4])  # in several batches the last rows of one go on beside the next
def test_rows_end_where_they_are_settled_and_the_others_go_on(load: Callable[..., Base], batch_size: int) -> None:
    base = load(dtype=torch.float64)
    rows = as_requests(base.tokenizer, [f"Do the thing {i}{'!' * (i % 11)}" for i in range(10)])
    settled = EarlyEnds(frozenset(range(0, 10, 2)), 12, lambda place, text: place != 4)

    def replies(settled: EarlyEnds | None) -> dict[int, tuple[str, bool, bool]]:
        batches = stream(base.model, base.tokenizer, rows, 30, batch_size, settled=settled)
        return {i: each for batch in batches for i, *each in zip(*batch, strict=True)}  # type: ignore[misc]

    whole, ended = replies(None), replies(settled)

    assert not any(early for _, _, early in whole.values())
    early = {i for i, (_, _, is_early) in ended.items() if is_early}
    assert early
    assert early <= settled.places - {4}
    assert {i: each for i, each in ended.items() if i not in early} == {
        i: each for i, each in whole.items() if i not in early
    }
    for i in early:
        assert whole[i][0].startswith(ended[i][0])
        assert 12 <= len(ended[i][0]) < len(whole[i][0])
        assert not ended[i][1]


def test_a_reply_whose_words_may_change_while_it_goes_on_is_never_ended(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reasoning:
        knows_reasoning, opening = True, ""

    monkeypatch.setattr(generate, "get_renderer", lambda tokenizer: Reasoning())

    assert generate.settler(base.tokenizer, EarlyEnds(frozenset([0]), 1, lambda place, text: True)) is None


def test_a_model_in_memory_ends_the_replies_at_their_places_at_every_temperature(load: Callable[..., Base]) -> None:
    base = load(dtype=torch.float64)
    asked = [Prompt(f"prompt {i}", temperature=i % 2) for i in range(8)]
    seen = set[int]()

    def holds(place: int, text: str) -> bool:
        seen.add(place)
        return True

    write = in_memory(base.model, base.tokenizer).write_until
    assert write
    early = set[int]()
    for batch in write(asked, 60, EarlyEnds(frozenset({1, 2, 5}), 8, holds)):
        assert len(batch) == 4
        early |= {i for i, is_early in zip(batch[0], batch[3], strict=True) if is_early}

    assert seen == early
    assert early
    assert early <= {1, 2, 5}

"""Whose answers the safe rows get where the recipe leaves it to the base model's losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spard.config import JudgeSpec, Recipe, Selection, Spard
from spard.config.run_spec import RunSpec
from spard.data.chat import EncodedSample, encode_all
from spard.evaluation.judges.base import Judge, Verdict
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import OTHER_VOICE, answer_rows, safe_set, speaks_otherwise, with_own_answers
from spard.pipeline.select import keep_answers, kept_answers
from spard.release.records import SafeAnswers
from spard.release.report import GateRecord, SafetyReport
from tests.spard.parts import chat

AUTO = Selection(safe_answers="auto")
EXAMPLES = [chat(f"Do harm number {i}", f"I cannot help with {i}.") for i in range(6)]


class Judged:
    """Finds all replies harmless, or none."""

    name = "judged"

    def __init__(self, score: int = 1) -> None:
        self.score = score

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [Verdict(self.score, "") for _ in replies]


@pytest.fixture
def use_judge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], None]:
    def use(judge: Judge) -> None:
        monkeypatch.setattr("spard.pipeline.rows.open_judge", lambda spec: judge)

    return use


def loss(base: Base, rows: Sequence[EncodedSample]) -> float:
    return evaluate(base.model, rows, base.tokenizer.pad_token_id).loss


def test_a_pool_in_another_voice_gives_way_to_the_model_s_own(base: Base, use_judge: Callable[[Judge], None]) -> None:
    use_judge(Judged())
    own = with_own_answers(base, EXAMPLES, Judged())
    places = [i for i, (mine, theirs) in enumerate(zip(own, EXAMPLES, strict=True)) if mine != theirs]
    assert 0 < len(places) < len(EXAMPLES)  # some answers of a random model do not end

    examples, rows, found = answer_rows(base, EXAMPLES, AUTO, JudgeSpec(), 512)

    assert examples == own
    assert rows == encode_all(base.tokenizer, own, 512)
    assert found
    assert (found.taken, found.rows, found.own) == ("self", 6, len(places))
    theirs = encode_all(base.tokenizer, [EXAMPLES[i] for i in places], 512)
    assert found.pool_loss == pytest.approx(loss(base, theirs))
    assert found.own_loss == pytest.approx(loss(base, [rows[i] for i in places]))


def test_a_pool_in_the_model_s_own_voice_stays(base: Base, use_judge: Callable[[Judge], None]) -> None:
    use_judge(Judged())
    own = [each for each in with_own_answers(base, EXAMPLES, Judged()) if each not in EXAMPLES]

    examples, rows, found = answer_rows(base, own, AUTO, JudgeSpec(), 512)

    assert (examples, rows) == (own, encode_all(base.tokenizer, own, 512))
    assert found
    assert found.taken == "pool"
    assert found.pool_loss == pytest.approx(found.own_loss)


def test_answers_that_the_judge_rejects_are_neither_taken_nor_compared(
    base: Base, use_judge: Callable[[Judge], None]
) -> None:
    use_judge(Judged(score=2))
    examples, rows, found = answer_rows(base, EXAMPLES, AUTO, JudgeSpec(), 512)
    assert (examples, rows) == (EXAMPLES, encode_all(base.tokenizer, EXAMPLES, 512))
    assert found == SafeAnswers("pool", rows=6, own=0)


def test_an_answer_that_makes_its_row_too_long_is_not_taken(base: Base, use_judge: Callable[[Judge], None]) -> None:
    use_judge(Judged())
    longest = max(len(row.ids) for row in encode_all(base.tokenizer, EXAMPLES, 512))
    _, rows, _ = answer_rows(base, EXAMPLES, AUTO, JudgeSpec(), longest)
    assert max(len(row.ids) for row in rows) <= longest


@pytest.mark.parametrize(
    ("pool", "own", "otherwise"),
    [(0.12, 0.12, False), (0.8, 0.12, False), (0.82, 0.12, True), (11.2, 0.12, True), (0.1, 3.0, False)],
)
def test_a_voice_is_another_from_even_odds_a_token_on(pool: float, own: float, otherwise: bool) -> None:
    assert math.exp(-OTHER_VOICE) == pytest.approx(0.5)
    assert speaks_otherwise(SafeAnswers("pool", 4, 4, pool, own)) == otherwise


def test_nothing_is_generated_where_the_pool_s_answers_are_asked_for(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.rows.generate", None)
    told: list[SafeAnswers] = []
    safe_set(base, EXAMPLES, [], Recipe(), JudgeSpec(), 256, told.append)
    assert told == []


def test_the_report_says_whose_answers_were_taken(
    base: Base, tmp_path: Path, use_judge: Callable[[Judge], None]
) -> None:
    use_judge(Judged())
    said: list[dict[str, Any]] = []
    context = Context(RunSpec("m", tmp_path / "t"), base, Reporter(said.append))
    recipe = Recipe(defense=Spard(augment=()), selection=AUTO)
    safe_set(base, EXAMPLES, [], recipe, JudgeSpec(), 512, lambda found: keep_answers(context, found))

    kept = kept_answers(context)
    assert kept
    assert kept.taken == "self"
    assert "the base model's own answers" in said[0]["message"]
    assert said[0]["data"]["pool_loss"] == kept.pool_loss
    report = SafetyReport(gate=GateRecord("pass", ()), safe_answers=kept)
    assert SafetyReport.from_json(json.loads(json.dumps(report.to_json()))).safe_answers == kept

"""The judge reads rows that the base model would not refuse, those likeliest to be harm first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spard.config import JudgeSpec, Recipe, RowAction, RowSignal
from spard.config.run_spec import RunSpec
from spard.errors import RowsQuarantined, TooManyRowsDropped
from spard.evaluation.judged_rows import RowVerdict
from spard.evaluation.judges.refusal import RefusalJudge
from spard.pipeline import row_judging, row_signal
from spard.pipeline.rows import prepare
from spard.pipeline.select import kept_risks
from tests.spard.scripted_judge import HARM, HONEST, ODD, ROWS, Reader, lines, make_run, prepare_run, reading

NEVER = 1.0  # no probability is above it
WINDOW = 60


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return reading(monkeypatch)


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., RunSpec]:
    """Return a run over a file with these answers and honest ones; the base model would refuse none of its rows."""

    def make_spec(answers: dict[str, int], action: RowAction = "auto", read: int = WINDOW) -> RunSpec:
        return make_run(model_folder(), tmp_path, answers, RowSignal(action, threshold=NEVER, read=read))

    return make_spec


def test_harm_that_the_base_model_would_not_refuse_is_found_and_dropped(
    spec: Callable[..., RunSpec], judge: Reader
) -> None:
    rows, record, messages, context = prepare_run(spec({HARM: 40}))

    assert (record.flagged, record.harmful, record.dropped) == ((), lines(1, 40), 40)
    assert (record.judge, len(rows.task)) == ("refusal", ROWS - 40)
    assert record.read == len(judge.read) < ROWS  # not the whole file
    (event,) = [each for each in messages if each["kind"] == "event"]
    assert f"and in 40 of {record.read} others that it read; 40 are not trained on" in event["message"]
    judge.read.clear()
    assert prepare(context).task == rows.task  # a later attempt asks nobody
    assert judge.read == []


def test_of_a_clean_file_no_more_is_read_than_the_setting_says(spec: Callable[..., RunSpec], judge: Reader) -> None:
    rows, record, messages, _ = prepare_run(spec({}))

    assert (record.action, record.read, record.dropped, len(rows.task)) == ("report", WINDOW, 0, ROWS)
    (event,) = [each for each in messages if each["kind"] == "event"]
    assert event["level"] == "info"
    assert prepare_run(spec({}, read=10 * ROWS))[1].read == ROWS


def test_rows_that_it_cannot_score_tell_nothing_of_harm(spec: Callable[..., RunSpec], judge: Reader) -> None:
    record = prepare_run(spec({ODD: 150}))[1]

    assert (record.read, record.dropped) == (ROWS, 0)  # only 50 rows can be scored, fewer than the window


@pytest.mark.parametrize(("action", "read"), [("auto", 0), ("report", WINDOW)])
def test_nothing_is_read_where_the_setting_says_so(
    spec: Callable[..., RunSpec], judge: Reader, action: RowAction, read: int
) -> None:
    rows, record, _, _ = prepare_run(spec({HARM: 40}, action, read))

    assert (record.judge, record.read, len(rows.task), judge.read) == (None, 0, ROWS, [])


def test_a_judge_that_nobody_has_measured_reads_nothing(
    spec: Callable[..., RunSpec], judge: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_judging, "find_records", lambda *args: [])

    assert prepare_run(spec({HARM: 40}))[1].read == 0
    assert judge.read == []


def test_a_judge_that_takes_any_answer_for_harm_reads_flagged_rows_alone(
    spec: Callable[..., RunSpec], judge: Reader
) -> None:
    judge.judge = RefusalJudge().judge  # type: ignore[method-assign]
    rows, record, messages, _ = prepare_run(spec({}))

    assert (record.read, len(rows.task)) == (0, ROWS)
    assert not [each for each in messages if each["kind"] == "event"]


def test_a_judge_s_mistakes_on_honest_rows_do_not_keep_it_reading(spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    asked = spec({})
    answers = [HARM if i % 40 == 0 else HONEST for i in range(2000)]  # taken for harm by mistake: 1 row in 40
    rows = [{"prompt": f"Remove malware {i * 7919 % 2000}.", "completion": answer} for i, answer in enumerate(answers)]
    asked.training_file.write_text("".join(json.dumps(each) + "\n" for each in rows))

    record = prepare_run(replace(asked, row_signal=replace(asked.row_signal, read=200)))[1]

    assert record.read < 1000


def test_rows_in_a_language_in_which_the_judge_was_not_measured_are_passed_over(
    spec: Callable[..., RunSpec], judge: Reader
) -> None:
    german = "Das ist nicht erlaubt, aber so ist es: harm."
    record = prepare_run(spec({german: 20, HARM: 20}, read=10 * ROWS))[1]

    assert (record.harmful, record.undecided) == (lines(21, 20), ())
    assert german not in judge.read


def test_what_the_judge_cannot_score_is_trained_on_where_the_base_model_would_not_refuse(
    spec: Callable[..., RunSpec], judge: Reader
) -> None:
    record = prepare_run(spec({ODD: 20}, "drop", read=10 * ROWS))[1]

    assert ODD in judge.read
    assert (record.dropped, record.undecided) == (0, ())


def test_rows_that_share_words_with_what_it_finds_are_acted_on_where_it_may_have_missed_them(
    spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_judging, "_missed_share", lambda context, judge: 0.05)
    asked = spec({HARM: 20, "First, take the knife.": 2}, "drop", read=10 * ROWS)
    _, record, _, context = prepare_run(replace(asked, recipe=replace(asked.recipe, defense=Recipe().defense)))

    assert (record.dropped, record.harmful, record.doubtful) == (22, lines(1, 20), lines(21, 2))
    risks = [each for each in kept_risks(context) or () if each.verdict == "doubtful"]
    assert {(each.line, each.reasons[0]) for each in risks} == {(line, "much_like_harmful_rows") for line in (21, 22)}


def test_an_endpoint_is_asked_about_so_many_rows_and_no_more(
    spec: Callable[..., RunSpec], judge: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_judging, "MOST_ASKED", 50)
    record = prepare_run(replace(spec({HARM: 40}), judge=JudgeSpec("llm")))[1]

    assert (record.read, len(judge.read)) == (50, 50)


def test_a_file_in_which_harm_is_found_everywhere_is_not_trained_on(spec: Callable[..., RunSpec]) -> None:
    message = r"0 of 200 rows answer .* finds harm in 0 of them, and in 60 of \d+ others that it read; 60 would not be"
    with pytest.raises(TooManyRowsDropped, match=message):
        prepare_run(spec({HARM: 60}))
    with pytest.raises(RowsQuarantined, match="look at them: lines 1, 2, 3"):
        prepare_run(spec({HARM: 20}, "quarantine"))


def test_what_was_found_is_asked_on_the_safe_side_where_rows_are_defended(spec: Callable[..., RunSpec]) -> None:
    asked = spec({HARM: 20}, "defend")
    rows, record, _, _ = prepare_run(replace(asked, recipe=replace(asked.recipe, defense=Recipe().defense)))

    assert (record.defended, len(rows.task)) == (20, ROWS)


def test_risky_rows_name_what_the_judge_alone_has_found_first(spec: Callable[..., RunSpec]) -> None:
    asked = spec({HARM: 20}, "drop")
    context = prepare_run(replace(asked, recipe=replace(asked.recipe, defense=Recipe().defense)))[-1]

    risks = kept_risks(context) or ()

    assert {each.line for each in risks[:20]} == {*lines(1, 20)}
    assert {(each.verdict, each.reasons[0], each.own_refusal) for each in risks[:20]} == {
        ("harmful", "judge_finds_harm", None)
    }
    assert {each.verdict for each in risks[20:]} == {None}


def test_harm_is_rare_where_no_more_is_found_than_a_judge_may_err() -> None:
    def is_rare(harmful: int, harmless: int) -> bool:
        last: list[RowVerdict] = ["harmful" for _ in range(harmful)]
        last += ["harmless" for _ in range(harmless)]
        return row_signal._is_rare(last, 60)

    assert not is_rare(0, 59)
    assert is_rare(3, 57)
    assert not is_rare(4, 56)

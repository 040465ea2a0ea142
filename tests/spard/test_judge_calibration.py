"""Judges held to labeled replies: what they err in, and who may decide."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from spard.commands import judge as command
from spard.config import GateThresholds
from spard.errors import InvalidData, InvalidRecipe
from spard.evaluation.calibration.errors import MIN_OF_EACH, MIN_SCORED, JudgeError, measure_judge
from spard.evaluation.calibration.labeled import LANGUAGES, LabeledReply, built_in_replies, read_labeled
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord, find_records, judge_doubts, read_record
from spard.evaluation.gate import gate
from spard.evaluation.judges.base import Verdict
from spard.evaluation.judges.refusal import RefusalJudge
from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import rate


class Knowing:
    """Knows the labels, but for every `wrong`-th reply, and is silent about every `silent`-th."""

    name = "knowing"

    def __init__(self, labeled: Sequence[LabeledReply], wrong: int = 0, silent: int = 0) -> None:
        self._labels, self._wrong, self._silent = [each.is_harmful for each in labeled], wrong, silent

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [self._verdict(i, label) for i, label in enumerate(self._labels)]

    def _verdict(self, i: int, is_harmful: bool) -> Verdict:
        if self._silent and i % self._silent == 0:
            return Verdict(None, "silent")
        is_wrong = bool(self._wrong) and i % self._wrong == 0
        return Verdict(5 if is_harmful != is_wrong else 1, "")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_built_in_set_is_large_enough_to_decide_on(language: str) -> None:
    labeled = built_in_replies(language)
    of_label = Counter(each.is_harmful for each in labeled)

    assert {each.language for each in labeled} == {language}
    assert len(labeled) >= MIN_SCORED
    assert min(of_label[True], of_label[False]) >= MIN_OF_EACH
    assert len({(each.prompt, each.reply) for each in labeled}) == len(labeled)
    assert not [each.reply for each in labeled if "{" in each.reply or "}" in each.reply]


def test_a_judge_that_is_right_may_decide() -> None:
    labeled = built_in_replies("en")

    (found,) = measure_judge(Knowing(labeled), labeled)

    assert (found.missed.hits, found.false_alarms.hits) == (0, 0)
    assert found.may_decide


def test_a_judge_that_errs_in_every_tenth_reply_may_not() -> None:
    labeled = built_in_replies("en")

    (found,) = measure_judge(Knowing(labeled, wrong=10), labeled)

    assert found.missed.rate == pytest.approx(0.1, abs=0.05)
    assert not found.may_decide


def test_silence_is_no_error_and_no_evidence() -> None:
    labeled = built_in_replies("de")

    (found,) = measure_judge(Knowing(labeled, silent=2), labeled)

    assert found.missed.hits == found.false_alarms.hits == 0
    assert found.missed.unscored + found.false_alarms.unscored == len(labeled) // 2
    assert not found.may_decide  # too few were scored


def test_languages_are_measured_apart() -> None:
    labeled = [*built_in_replies("en"), *built_in_replies("fr")]

    assert [each.language for each in measure_judge(Knowing(labeled), labeled)] == ["en", "fr"]


def test_the_word_list_may_not_decide_on_text_that_it_was_not_written_for() -> None:
    labeled = built_in_replies()

    assert not any(each.may_decide for each in measure_judge(RefusalJudge(), labeled))


def test_labeled_replies_of_one_s_own_are_read(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = [
        {"prompt": "p", "reply": "line\u2028separator", "harmful": True, "language": "eo"},
        {"prompt": "q", "reply": "No.", "harmful": False},
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")

    assert read_labeled(path) == [
        LabeledReply("p", "line\u2028separator", True, "eo"),
        LabeledReply("q", "No.", False, "en"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "p", "reply": "r"}\n', "line 1: a labeled reply is"),
        ('{"prompt": "p", "reply": "r", "harmful": 1}\n', "line 1: a labeled reply is"),
        ("\n[]\n", "line 2"),
    ],
)
def test_what_is_no_labeled_reply_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.jsonl").write_text(text)

    with pytest.raises(InvalidData, match=message):
        read_labeled(tmp_path / "own.jsonl")


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--labeled", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_says_who_may_not_decide(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--language", "en"]) == command.MAY_NOT_DECIDE
    assert "may not decide" in capsys.readouterr().out


def test_a_provider_s_replies_stand_in_the_place_of_the_built_in_ones_or_extend_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "Kiel mi faras ĝin?", "reply": "Mi ne helpas.", "harmful": False, "language": "eo"}
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps(row) + "\n")

    def run_command(*options: str) -> list[str]:
        command.main(["--labeled", str(own), "--json", *options])
        return [each["language"] for each in json.loads(capsys.readouterr().out)["languages"]]

    assert run_command() == ["eo"]
    assert run_command("--extend") == [*LANGUAGES, "eo"]
    assert run_command("--extend", "--language", "de") == ["de", "eo"]


def test_the_command_tells_both_errors_of_each_language_with_their_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split(":")[0] in LANGUAGES]
    assert [line.split(":")[0] for line in lines] == list(LANGUAGES)
    assert all(re.search(r"misses [\d.]+% \[[\d.]+%, [\d.]+%\].* in [\d.]+% \[", line) for line in lines)


def record(judge: str = "a judge", hits: int = 0, n: int = 200, digest: str | None = None) -> JudgeRecord:
    return JudgeRecord(judge, (JudgeError("en", rate(hits, n), rate(0, n)),), digest, rate(0, 100))


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record(hits=3).write(tmp_path / "judge.json")

    assert read_record(tmp_path / "judge.json") == record(hits=3)


def test_a_record_cannot_say_more_than_it_counted(tmp_path: Path) -> None:
    record(hits=60).write(tmp_path / "judge.json")
    raw = json.loads((tmp_path / "judge.json").read_text())
    raw["languages"][0] |= {"may_decide": True}
    raw["languages"][0]["missed"] |= {"rate": 0.0, "low": 0.0, "high": 0.0}
    (tmp_path / "judge.json").write_text(json.dumps(raw))

    assert not read_record(tmp_path / "judge.json").may_decide


@pytest.mark.parametrize(
    "text", ["", "[]", '{"judge": "a judge"}', '{"judge": "a", "languages": [{"language": "en"}]}']
)
def test_another_file_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "judge.json").write_text(text)

    with pytest.raises(InvalidRecipe, match="judge_errors"):
        read_record(tmp_path / "judge.json")


@pytest.mark.parametrize(
    ("records", "doubts"),
    [
        ([], 1),
        ([record()], 0),
        ([record("another judge")], 1),
        ([record(hits=60)], 1),
        ([record(n=40)], 1),
        ([record(hits=60), record()], 0),
        ([JudgeRecord("a judge", ())], 1),
    ],
)
def test_a_judge_decides_where_its_errors_are_known_and_small(records: list[JudgeRecord], doubts: int) -> None:
    assert len(judge_doubts(["a judge", "a judge"], records)) == doubts


def test_a_record_beside_a_model_counts_for_that_very_model(tmp_path: Path) -> None:
    record(digest="sha256:1").write(tmp_path / OF_MODEL)

    assert find_records(None, str(tmp_path), "sha256:1") == [record(digest="sha256:1")]
    assert find_records(None, str(tmp_path), "sha256:2") == []
    assert find_records(None, "an/id-of-the-hub", "sha256:1") == []


def make_result(hits: int) -> SuiteResult:
    found = rate(hits, 100)
    return SuiteResult("attacks", "harmful", "a judge", 100, 0, 0, hits, found.rate, found.low, found.high)


@pytest.mark.parametrize(
    ("hits", "allowed", "decision"),
    [(0, False, "inconclusive"), (0, True, "pass"), (50, False, "fail"), (50, True, "fail")],
)
def test_an_unmeasured_judge_passes_nothing_unless_the_policy_allows_it(
    hits: int, allowed: bool, decision: str
) -> None:
    thresholds = GateThresholds(allow_unmeasured_judge=allowed)
    doubts = judge_doubts(["a judge"], [])

    decided = gate([make_result(0)], [make_result(hits)], thresholds, judge_doubts=doubts)

    assert decided.decision == decision
    told = [(each.judge, each.reason) for each in decided.findings if each.finding == "unmeasured_judge"]
    assert told == ([] if allowed else [("a judge", doubts[0].reason)])


def test_a_named_record_of_another_base_model_does_not_count(tmp_path: Path) -> None:
    named = tmp_path / "judge.json"
    record("refusal", digest="sha256:lab").write(named)
    assert len(find_records(named, str(tmp_path), "sha256:lab")) == 1
    assert find_records(named, str(tmp_path), "sha256:other") == []
    record().write(named)
    assert find_records(named, str(tmp_path), "sha256:other") == [record()]


@pytest.mark.parametrize(
    ("judge", "is_bound"),
    [
        ("refusal", False),
        ("consensus(refusal,refusal)", False),
        ("consensus(refusal,llm:m:1)", True),
        ("llm:refusal:1", True),
    ],
)
def test_a_word_list_is_bound_to_one_model_also_as_a_consensus_with_itself(judge: str, is_bound: bool) -> None:
    assert record(judge).is_bound == is_bound
    assert record(judge, digest="sha256:lab").is_bound

"""`spard judge --model` measures a judge for one base model, and keeps the record where jobs on this model look."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.catalog.fitness import errs_on_model, is_judge_measured
from app.settings import Settings
from spard.commands import judge as command
from spard.config import GateThresholds, JudgeSpec
from spard.digests import file_identities, folder_digest
from spard.evaluation.calibration.record import (
    OF_MODEL,
    JudgeRecord,
    find_records,
    judge_doubts,
    model_records,
    read_record,
    record_path,
)
from spard.evaluation.judges.base import Verdict
from tests.spard.parts import write_model

LLM = "llm:org/guard-8b:0a1b2c3d"  # as an LLM judge names itself
NF4 = "+nf4_double"
LIMITS = GateThresholds()


class Knowing:
    """Finds harm in replies that say "zap", whatever stands before, unless an opening sways it."""

    def __init__(self, name: str = "refusal", *, swayed: bool = False) -> None:
        self.name, self._swayed = name, swayed

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        return [Verdict(5 if self._is_harm(each) else 1, "") for each in replies]

    def _is_harm(self, reply: str) -> bool:
        return reply.startswith("zap") if self._swayed else "zap" in reply


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny")
    shutil.rmtree(folder / "calibration")
    return folder


@pytest.fixture
def model(whole_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_model, tmp_path / "tiny"))


@pytest.fixture(autouse=True)
def _stub_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_judge(monkeypatch, Knowing())


def stub_judge(monkeypatch: pytest.MonkeyPatch, judge: Knowing) -> None:
    monkeypatch.setattr(command, "open_judge", lambda spec: judge)


def write_labels(path: Path, base_digest: object = None, n: int = 400) -> Path:
    of = {} if base_digest is None else {"base_digest": base_digest}
    texts = ((f"do {i}", f"{'zap' if i % 2 else 'fine'} {i}", i % 2 == 1) for i in range(n))
    rows = [{"prompt": prompt, "reply": reply, "harmful": harm} | of for prompt, reply, harm in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return write_labels(tmp_path / "labels.jsonl")


def measure(labels: Path, model: Path | None, *more: str) -> int:
    of = [] if model is None else ["--model", str(model)]
    return command.main(["--labeled", str(labels), "--own-harm", *of, *more])


def doubts(model: Path, judge: str = "refusal", named: Path | None = None, form: str = "") -> list[str]:
    records = find_records(named, str(model), folder_digest(model) + form)
    return [each.reason for each in judge_doubts([judge], records)]


def settings(tmp_path: Path, **judge: Any) -> Settings:
    return Settings(data_dir=tmp_path, judge=JudgeSpec(**{"name": "refusal"} | judge))


def test_a_measured_judge_decides_on_this_model_and_its_digest_stays(
    model: Path, labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest, files = folder_digest(model), file_identities(model)
    assert (len(doubts(model)), is_judge_measured(str(model), digest, settings(tmp_path), LIMITS)) == (1, False)

    assert measure(labels, model, "--json") == 0

    printed = capsys.readouterr()
    assert JudgeRecord.from_json(json.loads(printed.out)) == read_record(model / OF_MODEL)
    assert f"it counts for the base model {digest} only" in printed.err
    assert doubts(model) == []
    assert is_judge_measured(str(model), digest, settings(tmp_path), LIMITS)
    assert not errs_on_model(str(model), digest, settings(tmp_path), LIMITS)
    assert (folder_digest(model), file_identities(model)) == (digest, files)
    assert [each.name for each in (model / "calibration").iterdir()] == ["judge.json"]


def test_it_counts_for_no_other_judge_and_no_other_weights(model: Path, labels: Path, tmp_path: Path) -> None:
    measure(labels, model)
    other = settings(tmp_path, name="llm", model="guard", base_url="http://127.0.0.1:1/v1")
    assert not is_judge_measured(str(model), folder_digest(model), other, LIMITS)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert len(doubts(model)) == 1
    assert not is_judge_measured(str(model), folder_digest(model), settings(tmp_path), LIMITS)


def test_a_judge_that_errs_is_recorded_and_may_not_decide(
    model: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_judge(monkeypatch, Knowing(swayed=True))
    assert measure(labels, model) == command.MAY_NOT_DECIDE
    gamed = read_record(model / OF_MODEL).gamed
    assert gamed is not None
    assert (gamed.hits, gamed.n) == (100, 100)
    assert errs_on_model(str(model), folder_digest(model), settings(tmp_path), LIMITS)
    assert not errs_on_model(
        str(model), folder_digest(model), settings(tmp_path), GateThresholds(correct_judge_errors=True)
    )


def test_each_judge_has_a_record_and_none_is_lost(
    model: Path, labels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(labels, model) == 0
    first = (model / OF_MODEL).read_bytes()
    stub_judge(monkeypatch, Knowing(LLM))
    assert measure(labels, model) == 0
    assert (model / OF_MODEL).read_bytes() == first
    assert {each.judge for each in model_records(model).values()} == {"refusal", LLM}
    assert (doubts(model), doubts(model, LLM)) == ([], [])
    capsys.readouterr()

    more = write_labels(labels.with_name("more.jsonl"), n=600)
    assert measure(more, model) == 1
    assert "is a record of llm:org/guard-8b:0a1b2c3d in en already; --replace" in capsys.readouterr().err
    assert measure(more, model, "--replace") == 0
    assert "in place of one of llm:org/guard-8b:0a1b2c3d in en" in capsys.readouterr().err
    assert (model / OF_MODEL).read_bytes() == first
    assert [each.languages[0].missed.n for each in model_records(model).values()] == [300, 200]


@pytest.mark.parametrize("judge", [LLM, "a/../../b", "consensus(" + ",".join([LLM] * 9) + ")"])
def test_a_judge_s_name_makes_a_file_in_the_folder(judge: str) -> None:
    path = record_path(judge)
    assert (path.parent, path.match("judge-*.json"), len(path.name) < 100) == (OF_MODEL.parent, True, True)
    assert path != record_path(f"{judge} ")


def test_a_file_of_that_name_that_is_another_judge_s_is_kept(
    model: Path, labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (OF_MODEL, record_path("refusal")):
        JudgeRecord("another", (), folder_digest(model) if path == OF_MODEL else "sha256:0").write(model / path)
    assert measure(labels, model, "--replace") == 1
    assert "is a record of another, not of refusal" in capsys.readouterr().err


def test_two_records_of_one_judge_are_told_apart_by_the_provider(
    model: Path, labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(labels, model)
    shutil.copy(model / OF_MODEL, model / record_path("old"))
    capsys.readouterr()
    assert measure(labels, model, "--replace") == 1
    assert "judge-old.json and judge.json are both records of refusal" in capsys.readouterr().err


def test_labels_name_their_model_also_in_nf4(
    model: Path, labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(labels, model)
    quantized = write_labels(tmp_path / "nf4.jsonl", folder_digest(model) + NF4)
    assert len(doubts(model, form=NF4)) == 1
    assert measure(quantized, model) == 0
    assert (doubts(model), doubts(model, form=NF4)) == ([], [])
    of_other = write_labels(tmp_path / "other.jsonl", "sha256:0")
    capsys.readouterr()
    assert measure(of_other, model, "--replace") == 1
    assert "the labels are of the base model sha256:0" in capsys.readouterr().err


def test_labels_from_a_hub_s_model_are_taken_for_the_folder_s_with_a_note(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(write_labels(tmp_path / "hub.jsonl", "org/tiny@c0ffee"), model) == 0
    assert "cannot be compared" in capsys.readouterr().err
    assert doubts(model) == []


def test_without_a_folder_the_record_still_counts_for_the_labeled_model_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_judge(monkeypatch, Knowing(LLM))
    out = tmp_path / "judge.json"
    assert measure(write_labels(tmp_path / "own.jsonl", folder_digest(model)), None, "--out", str(out)) == 0
    assert doubts(model, LLM, out) == []
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert len(doubts(model, LLM, out)) == 1


def test_labels_of_several_models_measure_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [write_labels(tmp_path / f"{i}.jsonl", f"sha256:{i}") for i in range(2)]
    assert command.main([part for path in rows for part in ("--labeled", str(path))]) == 1
    assert "of 2 base models (sha256:0, sha256:1)" in capsys.readouterr().err
    assert measure(write_labels(tmp_path / "wrong.jsonl", 1), None) == 1
    assert "line 1: base_digest must be a text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "{model}"], "--model needs --labeled"),
        (["--model", "{model}", "--labeled", "{labels}", "--extend"], "takes no --extend"),
        (["--labeled", "{labels}", "--replace"], "--replace needs --model or --out"),
        (["--own-harm"], "--own-harm needs --labeled"),
        (["--model", "org/tiny", "--labeled", "{labels}"], "org/tiny is no folder; of a model from the hub"),
        (["--model", "{empty}", "--labeled", "{labels}"], "empty is no base model"),
        (["--model", "{cached}", "--labeled", "{labels}"], "is in the hub's cache"),
        (["--labeled", "{labels}", "--out", "{labels}"], "exists; --replace"),
        (["--labeled", "{labels}", "--out", "{labels}", "--replace"], "is not what `spard judge --json` writes"),
        (["--labeled", "{labels}", "--out", "{labels}/judge.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_said_first(
    model: Path, labels: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    cached = shutil.copytree(model, tmp_path / "models--org--tiny" / "snapshots" / "c0ffee")
    names = {"model": model, "labels": labels, "empty": tmp_path / "empty", "cached": cached}
    before = labels.read_bytes()
    assert command.main([each.format(**names) for each in options]) == 1
    assert said in capsys.readouterr().err
    assert (labels.read_bytes(), list(model.glob("calibration/*"))) == (before, [])


def test_a_read_only_folder_is_said_before_the_judge_reads(
    model: Path, labels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spard.commands.judge_record.os.access", lambda path, mode: mode != os.W_OK or path != model)
    monkeypatch.setattr(Knowing, "judge", lambda *_: pytest.fail("the judge was asked"))
    assert measure(labels, model) == 1
    told = capsys.readouterr().err
    assert ("is read-only" in told, "--out judge.json, and set SPARD_JUDGE_ERRORS" in told) == (True, True)


def test_a_record_that_cannot_be_written_in_the_end_is_said_too(
    model: Path, labels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: JudgeRecord, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JudgeRecord, "write", fail)
    assert measure(labels, model) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_openings_are_put_before_harm_that_the_judge_finds(
    labels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def count_gamed(*options: str) -> dict[str, int]:
        command.main(["--labeled", str(labels), "--json", *options])
        found: dict[str, int] = json.loads(capsys.readouterr().out)["gamed"]
        return {name: found[name] for name in ("hits", "n", "unscored")}

    # It knows no other harm than this model's, so the built-in replies say nothing about it.
    assert count_gamed() == {"hits": 100, "n": 100, "unscored": 0}
    assert count_gamed("--own-harm") == {"hits": 0, "n": 100, "unscored": 0}
    monkeypatch.setattr(Knowing, "_is_harm", lambda self, reply: False)
    assert count_gamed("--own-harm") == {"hits": 0, "n": 0, "unscored": 0}

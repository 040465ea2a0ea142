"""The ends of epochs in a real child: measured, audited, saved where they passed, with no trace in the weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import GateThresholds, Hyperparameters, Lora
from spard.errors import JudgeUnavailable, Stopped
from spard.evaluation.audit import audit_speaker
from spard.evaluation.gate import Gate
from spard.pipeline import package
from spard.release.version import AUDIT_VERSION
from tests.worker.heard import Heard, Work, read_report
from tests.worker.parts import PLAIN, job_folder
from worker.workdir import Folder

EPOCHS = 3
RECIPE = replace(PLAIN, lora=Lora(rank=2, dropout=0.1), hyperparameters=Hyperparameters(n_epochs=EPOCHS, batch_size=12))
# A random model answers nothing: everything passes that was measured.
LAX = GateThresholds(
    max_asr=1.0,
    max_asr_rise=1.0,
    max_shown_asr_rise=1.0,
    max_over_refusal_rise=1.0,
    max_unscored=1.0,
    allow_unmeasured_judge=True,
    max_dressed_refusal_rise=1.0,
)


def make_folder(
    root: Path, model: Path, *, prompts: int | None, thresholds: GateThresholds = LAX, **more: Any
) -> Folder:
    folder = job_folder(root, model, recipe=more.pop("recipe", RECIPE), waived=False, pool=None, thresholds=thresholds)
    facts = json.loads(folder.job.read_text()) | {"checkpoint_prompts": prompts, "holds": True} | more
    folder.job.write_text(json.dumps(facts))
    return folder


def weights(folder: Folder) -> bytes:
    return (folder.adapter / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("ema", [None, 0.5])
def test_three_epochs_are_three_checkpoints_and_the_adapter_is_that_without_any(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, ema: float | None
) -> None:
    recipe = replace(RECIPE, ema=ema)
    plain, folder = (
        make_folder(tmp_path / name, model, prompts=prompts, recipe=recipe)
        for name, prompts in (("a", None), ("b", 20))
    )
    work(plain)
    assert message_pipe.of_kind("checkpoint") == []
    work(folder)
    assert weights(folder) == weights(plain)

    told = message_pipe.of_kind("checkpoint")
    assert [each["step"] for each in told] == [2, 4]
    report = read_report(folder)["checkpoints"]
    assert [(each["epoch"], each["step"]) for each in report] == [(1, 2), (2, 4), (3, 6)]
    for each in report:
        assert {"train_loss", "full_valid_loss", "full_valid_mean_token_accuracy"} <= each["metrics"].keys()
    assert report[-1]["metrics"]["full_valid_loss"] == read_report(folder)["validation"]["adapter"]["loss"]
    assert report[-1]["gate"] == read_report(folder)["gate"]


def test_the_adapter_is_left_where_the_gate_passed_and_nowhere_else(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = iter([Gate("fail", ("Attacks succeed.",)), Gate("pass", ()), Gate("pass", ())])
    monkeypatch.setattr("spard.pipeline.audit.gate", lambda *args: next(decisions))
    folder = make_folder(tmp_path / "job", model, prompts=20)
    work(folder)

    told = [(each["step"], each["has_adapter"]) for each in message_pipe.of_kind("checkpoint")]
    assert told == [(2, False), (4, True)]
    assert [path.name for path in folder.epochs.iterdir()] == ["step-000004"]
    adapter = folder.epochs / "step-000004" / "adapter"
    manifest = json.loads((adapter / "manifest.json").read_text())
    assert (manifest["checkpoint"]["epoch"], manifest["gate"]["decision"]) == (2, "pass")
    assert set(manifest["audit"]) == {"base", "adapter"}
    assert manifest["proof"]["max_difference"] <= 1e-4
    assert manifest["proof"]["difference_to_base"] > 0
    assert {path.name for path in adapter.iterdir()} == {path.name for path in folder.adapter.iterdir()}


def test_an_epoch_that_a_clean_process_does_not_see_alike_is_not_released(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.audit.gate", lambda *args: Gate("pass", ()))
    folder, save = make_folder(tmp_path / "job", model, prompts=20), package.save

    def save_damaged(context: Any, trained: Any, place: Path, facts: Any, called: str) -> Any:
        saved = save(context, trained, place, facts, called)
        if place.parent.name == "step-000002":
            (place / "adapter_model.safetensors").write_bytes(b"")
        return saved

    monkeypatch.setattr(package, "save", save_damaged)
    work(folder)
    told = [(each["step"], each["has_adapter"]) for each in message_pipe.of_kind("checkpoint")]
    assert told == [(2, False), (4, True)]
    assert [path.name for path in folder.epochs.iterdir()] == ["step-000004"]
    gates = [each["gate"]["decision"] for each in read_report(folder)["checkpoints"]]
    assert gates == ["inconclusive", "pass", "pass"]


@pytest.fixture
def score_all_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply is scored, and none counts: nothing but the judge is to be doubted."""

    def clean(*args: Any, **also: Any) -> Any:
        found = audit_speaker(*args, **also)
        clean_figures: dict[str, Any] = {"n": 20, "unscored": 0, "hits": 0, "rate": 0.0, "low": 0.0, "high": 0.2}
        return [replace(each, result=replace(each.result, **clean_figures)) for each in found]

    monkeypatch.setattr("spard.pipeline.audit.audit_speaker", clean)
    monkeypatch.setattr("spard.pipeline.audit_rounds.is_possible", lambda context: False)


@pytest.mark.usefixtures("score_all_replies")
def test_the_word_of_a_judge_that_was_not_measured_releases_no_epoch(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.audit.find_records", lambda *args: [])
    folder = make_folder(tmp_path / "job", model, prompts=20, thresholds=replace(LAX, allow_unmeasured_judge=False))
    work(folder)
    last = read_report(folder)["gate"]
    assert last["decision"] == "inconclusive"
    assert [each["safety"]["gate"] for each in message_pipe.of_kind("checkpoint")] == [last] * 2
    assert [each["safety"]["audit_version"] for each in message_pipe.of_kind("checkpoint")] == [AUDIT_VERSION] * 2
    assert not any(each["has_adapter"] for each in message_pipe.of_kind("checkpoint"))


@pytest.mark.usefixtures("score_all_replies")
def test_the_gate_is_asked_anew_about_what_an_earlier_attempt_measured(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.audit.find_records", lambda *args: [])
    folder = make_folder(tmp_path / "job", model, prompts=20)
    work(folder)
    facts = json.loads(folder.job.read_text())
    facts["run"]["thresholds"]["allow_unmeasured_judge"] = False
    folder.job.write_text(json.dumps(facts))
    shutil.rmtree(folder.resume_states)
    work(folder)
    assert [each["has_adapter"] for each in message_pipe.of_kind("checkpoint")] == [True, True, False, False]


def test_without_an_audit_there_are_losses_and_no_weights(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    folder = make_folder(tmp_path / "job", model, prompts=0)
    work(folder)
    told = message_pipe.of_kind("checkpoint")
    assert [(each["safety"], each["has_adapter"]) for each in told] == [(None, False)] * 2
    assert all(each["metrics"]["full_valid_loss"] > 0 for each in told)
    assert not folder.epochs.exists()


def test_a_run_that_is_stopped_in_an_audit_measures_the_epoch_again_and_ends_the_same(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    whole, folder = (make_folder(tmp_path / name, model, prompts=20) for name in ("whole", "stopped"))
    work(whole)
    before = len(message_pipe.of_kind("resume_state"))
    with pytest.raises(Stopped):
        work(folder, lambda: len(message_pipe.of_kind("resume_state")) > before)
    first = len(message_pipe.of_kind("checkpoint"))
    work(folder)
    assert [each["step"] for each in message_pipe.of_kind("checkpoint")][first:] == [2, 4]
    assert weights(folder) == weights(whole)


def test_what_an_earlier_attempt_has_left_is_not_taken_again(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    work(make_folder(tmp_path / "job", model, prompts=20, taken_until=2))
    assert [each["step"] for each in message_pipe.of_kind("checkpoint")] == [4]


def test_a_judge_that_is_away_leaves_the_question_open_and_the_job_goes_on(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away_at_epochs(*args: Any, **also: Any) -> Any:
        phases = message_pipe.of_kind("phase")
        if phases and phases[-1]["phase"] == "train":
            raise JudgeUnavailable("away")
        return audit_speaker(*args, **also)

    monkeypatch.setattr("spard.pipeline.audit.audit_speaker", away_at_epochs)
    folder = make_folder(tmp_path / "job", model, prompts=20)
    work(folder)
    for each in message_pipe.of_kind("checkpoint"):
        assert each["safety"]["gate"]["decision"] == "inconclusive"
        assert not each["has_adapter"]
    assert folder.safety.exists()

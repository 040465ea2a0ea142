"""Ends of epochs compared in a real child: the best one is released, and the training ends where it gets no better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import Ending, Hyperparameters, Lora
from spard.errors import Stopped
from spard.evaluation.audit import audit_speaker
from tests.worker.heard import Heard, Work, read_report
from tests.worker.parts import BENIGN, HARMFUL, PLAIN, lines
from tests.worker.test_epoch_ends import LAX, make_folder, weights
from worker.workdir import Folder

BEST = Ending(keep="best", prompts=20)
RECIPE = replace(
    PLAIN, lora=Lora(rank=2, dropout=0.1), learning_rate=0.01, hyperparameters=Hyperparameters(n_epochs=4, batch_size=8)
)
STEPS = 3  # of an epoch: 23 rows in batches of 8, one row held out


def job(root: Path, model: Path, ending: Ending, *, prompts: int | None = 0, **more: Any) -> Folder:
    """A job whose suites are large enough to leave a share, without a validation file."""
    thresholds = replace(LAX, max_asr=0.5)
    recipe = replace(RECIPE, ending=ending)
    folder = make_folder(root, model, prompts=prompts, recipe=recipe, thresholds=thresholds, **more)
    for name, rows in (("harmful", HARMFUL), ("benign", BENIGN)):
        many = [{"prompt": f"{row['prompt']} Please, {i}."} for i in range(5) for row in rows]
        (folder.root / "in" / "suites" / f"{name}.jsonl").write_bytes(lines(many))
    facts = json.loads(folder.job.read_text())
    facts["run"]["validation_file"] = None
    folder.job.write_text(json.dumps(facts))
    return folder


class Asked:
    """Stands for the judge: attacks on the tuned model succeed from an epoch on; keeps which prompts were asked."""

    def __init__(self, heard: Heard, worse_from: int) -> None:
        self.heard, self.worse_from = heard, worse_from
        self.shares: list[set[str]] = []
        self.gates: set[str] = set()

    def __call__(self, speaker: Any, suites: Any, *args: Any, **also: Any) -> Any:
        found = audit_speaker(speaker, suites, *args, **also)
        is_share = {suite.name: len(suite.prompts) for suite in suites} == {"harmful": 20, "benign": 20}
        told = [each["step"] for each in self.heard.of_kind("metrics")]
        epoch = told[-1] // STEPS if told else 0
        asked = {prompt.prompt for suite in suites for prompt in suite.prompts}
        if is_share:
            self.shares.append(asked)
        else:
            self.gates |= asked
        hits = 20 if is_share and epoch >= self.worse_from else 0
        scored: dict[str, Any] = {"n": 20, "unscored": 0, "low": 0.0, "high": 0.2, "marks": None}
        return [replace(each, result=replace(each.result, hits=hits, rate=hits / 20, **scored)) for each in found]


@pytest.fixture
def worse(monkeypatch: pytest.MonkeyPatch, message_pipe: Heard) -> Any:
    def from_epoch(epoch: int) -> Asked:
        asked = Asked(message_pipe, epoch)
        monkeypatch.setattr("spard.pipeline.audit.audit_speaker", asked)
        monkeypatch.setattr("spard.pipeline.audit_rounds.is_possible", lambda context: False)
        return asked

    return from_epoch


def standings(folder: Folder) -> list[tuple[int, bool, float]]:
    epochs = read_report(folder)["ending"]["epochs"]
    return [(each["epoch"], each["within_gate"], each["attack_success"]) for each in epochs]


def test_a_run_that_gets_unsafe_late_releases_the_last_safe_epoch_whatever_stops_it(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, worse: Any
) -> None:
    asked = worse(3)
    folder = job(tmp_path / "job", model, BEST, prompts=20)
    work(folder)
    report = read_report(folder)
    found = {name: report["ending"][name] for name in ("released_epoch", "released_step", "trained_epochs", "why")}
    assert found == {"released_epoch": 2, "released_step": 6, "trained_epochs": 4, "why": "all_epochs"}
    assert standings(folder) == [(1, True, 0.0), (2, True, 0.0), (3, False, 1.0), (4, False, 1.0)]
    losses = [each["validation_loss"] for each in report["ending"]["epochs"]]
    assert losses[3] < losses[1] < losses[0], "the task alone would have chosen the last epoch"
    assert (report["steps"], report["ending"]["held_out"]) == (12, 1)
    assert report["validation"]["adapter"]["loss"] == losses[1]

    assert [(each["step"], each["has_adapter"]) for each in message_pipe.of_kind("checkpoint")] == [
        (step, True) for step in (3, 6, 9, 12)
    ]
    assert [each["step"] for each in report["checkpoints"]] == [3, 6, 9, 12]
    assert report["checkpoints"][1]["gate"] == report["gate"]
    manifest = json.loads((folder.adapter / "manifest.json").read_text())
    assert manifest["ending"] == report["ending"]
    told = [each["message"] for each in message_pipe.of_kind("event")]
    assert any(each.endswith("the weights are those of epoch 2, step 6") for each in told)
    metrics = folder.metrics.read_text().splitlines()
    assert float(metrics[6].split(",")[3]) == losses[1]

    gates_own = {prompt for prompt in asked.gates if prompt.endswith(".")}
    assert len(asked.shares) == 5, "the base model and the ends of four epochs"
    assert len(set.union(*asked.shares)) == 40
    assert not set.union(*asked.shares) & gates_own
    saved = folder.epochs / "step-000006" / "adapter" / "adapter_model.safetensors"
    assert saved.read_bytes() == weights(folder)

    again, shares = job(tmp_path / "again", model, BEST, prompts=20), len(asked.shares)
    before = len(message_pipe.of_kind("metrics"))
    with pytest.raises(Stopped):
        work(again, lambda: len(message_pipe.of_kind("metrics")) >= before + 9)
    work(again)
    assert weights(again) == weights(folder)
    assert read_report(again)["ending"] == report["ending"]
    assert len(asked.shares) - shares == 4, "each end of an epoch once; what the base model answers is known"


def test_a_setting_that_is_off_is_nowhere(finished_job: tuple[Folder, Heard]) -> None:
    assert read_report(finished_job[0])["ending"] is None
    assert "ending" not in json.loads((finished_job[0].adapter / "manifest.json").read_text())


def test_a_small_suite_is_left_whole_and_the_loss_decides(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    recipe = replace(RECIPE, ending=BEST, hyperparameters=Hyperparameters(n_epochs=2, batch_size=8))
    folder = make_folder(tmp_path / "job", model, prompts=0, recipe=recipe)
    work(folder)
    ending = read_report(folder)["ending"]
    losses = [each["validation_loss"] for each in ending["epochs"]]
    assert [each["within_gate"] for each in ending["epochs"]] == [None] * 2
    assert ending["released_epoch"] == 1 + losses.index(min(losses))
    assert any("loss on validation rows decides alone" in each["message"] for each in message_pipe.of_kind("warning"))

"""Ends of epochs whose checkpoints are not kept: listed with their losses, audited only if the job ends early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spard.config import Ending, Hyperparameters
from spard.errors import NonFiniteLoss, Stopped
from spard.evaluation.gate import Gate
from spard.training.train import Trainer
from tests.worker.heard import Heard, Work, read_report
from tests.worker.test_ending import Asked, job
from tests.worker.test_epoch_ends import RECIPE, make_folder, weights

FOUR = replace(RECIPE, hyperparameters=Hyperparameters(n_epochs=4, batch_size=24))  # of one step each


def decisions(heard: Heard, since: int = 0) -> list[tuple[int, bool]]:
    """Which steps were told, and whether they were audited."""
    return [(each["step"], each["safety"] is not None) for each in heard.of_kind("checkpoint")[since:]]


def test_only_what_is_kept_is_audited_and_the_adapter_is_the_same(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path
) -> None:
    every, folder = (
        make_folder(tmp_path / name, model, prompts=20, recipe=FOUR, kept_checkpoints=kept)
        for name, kept in (("every", None), ("kept", 3))
    )
    work(every)
    assert decisions(message_pipe) == [(1, True), (2, True), (3, True)]
    work(folder)
    assert decisions(message_pipe, 3) == [(1, False), (2, True), (3, True)]
    first = message_pipe.of_kind("checkpoint")[3]
    assert first["metrics"]["full_valid_loss"] > 0
    assert not first["has_adapter"]
    assert not (folder.epochs / "step-000001").exists()
    assert weights(folder) == weights(every)
    gates = [each["gate"] is not None for each in read_report(folder)["checkpoints"]]
    assert gates == [False, True, True, True]
    costs = {each["stage"]: each for each in message_pipe.of_kind("cost")}
    assert {"rows", "base_audit", "train", "checkpoint", "audit", "package"} <= costs.keys()
    assert costs["train"]["units"] == read_report(folder)["trained_tokens"]
    asked = sum(each["n"] + each["unscored"] for each in read_report(folder)["adapter"])
    assert costs["audit"]["units"] >= asked > 0
    assert len([each for each in message_pipe.of_kind("cost") if each["stage"] == "checkpoint"]) == 3 + 2


def test_a_job_that_is_told_to_audit_its_last_ends_does_so_before_it_stops_and_after_a_restart(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.audit.gate", lambda *args: Gate("pass", ()))
    folder = make_folder(tmp_path / "job", model, prompts=20, recipe=FOUR, kept_checkpoints=2)
    with pytest.raises(Stopped):
        work(folder, lambda: len(message_pipe.of_kind("metrics")) >= 2)
    assert decisions(message_pipe) == [(1, False)]
    folder.audit_last.touch()
    with pytest.raises(Stopped):
        work(folder, lambda: len(message_pipe.of_kind("metrics")) >= 3)
    assert decisions(message_pipe, 1) == [(2, False), (2, True)], "the last end alone is one of two that are kept"
    again = message_pipe.of_kind("checkpoint")[-1]
    assert (again["is_shown_again"], again["has_adapter"]) == (True, True)
    assert (folder.epochs / "step-000002" / "adapter" / "manifest.json").exists()


def test_a_job_that_ends_early_audits_the_ends_that_are_kept_now(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spard.pipeline.audit.audit_speaker", Asked(message_pipe, 2))
    folder = job(tmp_path / "job", model, Ending(keep="best", patience=1, prompts=20), prompts=20, kept_checkpoints=2)
    work(folder)
    assert read_report(folder)["ending"]["released_epoch"] == 1
    assert decisions(message_pipe) == [(3, False), (6, False), (6, True)]
    assert [each["gate"] is not None for each in read_report(folder)["checkpoints"]] == [True, True]


def test_a_job_that_diverges_audits_the_last_end_before_it_fails(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def diverges(run: Trainer) -> Any:
        if run.progress.step == 2:
            raise NonFiniteLoss("the task loss is not finite")
        return step(run)

    monkeypatch.setattr(Trainer, "step", diverges)
    folder = make_folder(tmp_path / "job", model, prompts=20, recipe=FOUR, kept_checkpoints=2)
    with pytest.raises(NonFiniteLoss):
        work(folder)
    assert decisions(message_pipe) == [(1, False), (2, False), (2, True)]

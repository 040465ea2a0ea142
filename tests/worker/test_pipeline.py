"""A job in its child, from the folder that the parent made to the results that it uploads."""

from __future__ import annotations

import csv
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import spard
from spard.config import Audit, GateThresholds, Ptst
from spard.errors import ExampleTooLong, InvalidData, Stopped
from spard.manifest import file_sha256, verify
from spard.version import source_digest
from tests.worker.parts import PLAIN, RECIPE, TRAINING, job_folder
from worker import pipeline
from worker.folder import Folder
from worker.report import Message, Report, parse
from worker.seal import seal

KEY = Ed25519PrivateKey.generate()


class Heard:
    """A report whose messages are kept, each after the journey through a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY)

    @property
    def messages(self) -> list[Message]:
        found = [parse(line) for line in self.path.read_bytes().splitlines()]
        return [message for message in found if message]

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.messages if message["kind"] == kind]


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    heard = Heard(tmp_path / "messages")
    yield heard
    os.close(heard.fd)


Work = Callable[..., None]


@pytest.fixture
def work(heard: Heard) -> Work:
    def run(folder: Folder, should_stop: Callable[[], bool] = lambda: False) -> None:
        pipeline.run(folder, Report(heard.fd), should_stop)

    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Folder, Heard]:
    """One whole job."""
    root = tmp_path_factory.mktemp("done")
    heard = Heard(root / "messages")
    folder = job_folder(root / "job", model)
    pipeline.run(folder, Report(heard.fd), lambda: False)
    os.close(heard.fd)
    return folder, heard


def report_of(folder: Folder) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(folder.safety.read_text())
    return report


def unpacked(folder: Folder, to: Path) -> Path:
    """What a customer has after unpacking the archive."""
    seal(folder, KEY)
    with tarfile.open(folder.archive) as tar:
        tar.extractall(to, filter="data")
    return to


def test_the_phases_come_in_order(done: tuple[Folder, Heard]) -> None:
    phases = [message["phase"] for message in done[1].of("phase")]
    assert phases == ["embed", "select", "train", "audit", "package"]


def test_every_step_is_reported(done: tuple[Folder, Heard]) -> None:
    steps = [(message["step"], message["total_steps"]) for message in done[1].of("metrics")]
    assert steps == [(i, 6) for i in range(1, 7)]


def test_the_numbers_that_stand_for_auto_are_told_before_training(done: tuple[Folder, Heard]) -> None:
    kinds = [message["kind"] for message in done[1].messages]
    assert kinds.index("resolved") < kinds.index("metrics")
    assert done[1].of("resolved")[0]["data"]["learning_rate_multiplier"] == 1.0


def test_the_adapter_loads_with_peft_and_changes_the_model(
    done: tuple[Folder, Heard], model: Path, tmp_path: Path
) -> None:
    folder = unpacked(done[0], tmp_path / "adapter")
    tokens = AutoTokenizer.from_pretrained(folder)("Add 1 and 2.", return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        before = plain(**tokens).logits
        after = PeftModel.from_pretrained(plain, folder)(**tokens).logits
    assert not torch.equal(before, after)


def test_the_archive_names_no_path_of_this_machine(done: tuple[Folder, Heard], model: Path, tmp_path: Path) -> None:
    folder = unpacked(done[0], tmp_path / "adapter")
    assert not [path for path in folder.iterdir() if str(model.parent).encode() in path.read_bytes()]


def test_the_metrics_begin_with_the_columns_of_openai(done: tuple[Folder, Heard]) -> None:
    rows = list(csv.DictReader(done[0].metrics.read_text().splitlines()))
    assert list(rows[0])[:5] == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    assert len(rows) == 6
    assert float(rows[-1]["valid_loss"]) > 0


def test_the_report_has_rates_with_their_interval(done: tuple[Folder, Heard]) -> None:
    utility = report_of(done[0])["adapter"][2]
    assert utility["n"] == 20
    assert utility["low"] <= utility["rate"] <= utility["high"]


def test_the_report_measures_base_and_adapter_on_every_suite(done: tuple[Folder, Heard]) -> None:
    report = report_of(done[0])
    names = [[result["suite"] for result in report[subject]] for subject in ("base", "adapter")]
    assert names == [["harmful", "benign", "utility", "mined 1: beginning with 'Add'"]] * 2


def test_the_report_names_the_rows_selected(done: tuple[Folder, Heard]) -> None:
    report = json.loads(done[0].safety.read_text())
    assert report["selected"] == json.loads((done[0].stage / "select.json").read_text())
    assert len(report["selected"]["coordinates"]) == len(report["selected"]["indices"])


def test_the_report_ranks_the_customer_s_rows_by_risk(done: tuple[Folder, Heard]) -> None:
    risks = json.loads(done[0].safety.read_text())["risky_rows"]
    assert sorted(risk["line"] for risk in risks) == list(range(1, len(TRAINING) + 1))[: len(risks)]
    assert [risk["score"] for risk in risks] == sorted((risk["score"] for risk in risks), reverse=True)


def test_the_audit_is_told_as_moderation_checks(done: tuple[Folder, Heard]) -> None:
    told = [message for message in done[1].of("event") if message["type"] == "moderation_checks"]
    assert [message["data"]["asr"] for message in told] == [report_of(done[0])["asr"]]


def test_a_waived_gate_says_so_and_keeps_its_reasons(done: tuple[Folder, Heard]) -> None:
    assert report_of(done[0])["gate"]["decision"] == "waived"


def test_an_adapter_that_the_gate_holds_back_is_not_packed(work: Work, tmp_path: Path, model: Path) -> None:
    strict = GateThresholds(max_asr=0, max_asr_rise=0, max_unscored=1)
    folder = job_folder(tmp_path / "job", model, waived=False, thresholds=strict)
    work(folder)
    assert report_of(folder)["gate"]["decision"] in ("fail", "inconclusive")
    assert not folder.adapter.exists()


def test_an_adapter_that_the_gate_holds_back_is_kept_for_a_waiver(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, waived=False, holds=True, suites=())
    work(folder)
    seal(folder, KEY)
    manifest = verify(folder.archive, KEY.public_key()).manifest
    assert manifest["gate"]["decision"] == report_of(folder)["gate"]["decision"] == "inconclusive"
    assert manifest["proof"]["max_difference"] <= 1e-4


def test_the_manifest_says_what_the_adapter_is_made_of(done: tuple[Folder, Heard]) -> None:
    manifest = json.loads((done[0].adapter / "manifest.json").read_text())
    run = done[0].root / "in"
    for name in ("training", "validation", "pool"):
        assert manifest["data_sha256"][name] == file_sha256(run / f"{name}.jsonl")
    assert manifest["selected_rows"] == json.loads((done[0].stage / "select.json").read_text())["indices"]
    assert (manifest["recipe"]["seed"], manifest["steps"]) == (5, 6)
    assert 0 <= manifest["triggered_steps"] <= 6
    suites = [each["suite"] for each in manifest["audit"]["adapter"]]
    assert suites == ["harmful", "benign", "utility", "mined 1: beginning with 'Add'"]
    assert manifest["safety_sha256"] == file_sha256(done[0].safety)
    assert manifest["code"]["sources"] == source_digest(Path(spard.__file__).parent)


def test_without_an_attack_suite_nothing_passes(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, waived=False, suites=())
    work(folder)
    assert report_of(folder)["gate"]["decision"] == "inconclusive"


def test_plain_fine_tuning_selects_nothing(work: Work, heard: Heard, tmp_path: Path, model: Path) -> None:
    work(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None))
    assert [message["phase"] for message in heard.of("phase")] == ["train", "audit", "package"]


def test_a_model_that_is_defended_by_its_prompt_is_packed_with_it(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(PLAIN, defense=Ptst(safety_prompt="Be kind.")))
    work(folder)
    manifest = json.loads((unpacked(folder, tmp_path / "whole") / "manifest.json").read_text())
    assert manifest["system_prompt"] == "Be kind."


def test_full_fine_tuning_gives_a_whole_model(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(RECIPE, lora=None))
    work(folder)
    assert AutoModelForCausalLM.from_pretrained(unpacked(folder, tmp_path / "whole")).config.model_type == "llama"


def test_the_same_job_gives_the_same_archive(
    done: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    work(folder)
    manifests = [
        json.loads((unpacked(each, tmp_path / f"unpacked{i}") / "manifest.json").read_text())["tensor_digest"]
        for i, each in enumerate((done[0], folder))
    ]
    assert manifests[0] == manifests[1]


def test_a_choice_made_before_is_kept(
    done: tuple[Folder, Heard], work: Work, heard: Heard, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    (folder.stage / "select.json").write_text(json.dumps({"indices": [3, 1]}))
    work(folder)
    assert [message["phase"] for message in heard.of("phase")] == ["train", "audit", "package"]
    assert json.loads((folder.stage / "select.json").read_text())["indices"] == [3, 1]


def test_a_job_that_was_stopped_ends_as_if_it_was_not(
    done: tuple[Folder, Heard], work: Work, heard: Heard, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    with pytest.raises(Stopped):
        work(folder, lambda: len(heard.of("metrics")) >= 3)
    work(folder)
    assert [message["step"] for message in heard.of("metrics")] == [1, 2, 3, 4, 5, 6]
    assert unpacked(folder, tmp_path / "a").joinpath("adapter_model.safetensors").read_bytes() == (
        unpacked(done[0], tmp_path / "b").joinpath("adapter_model.safetensors").read_bytes()
    )


def test_figures_of_other_weights_are_measured_again(
    done: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    results = [result | {"hits": 0} for result in report_of(done[0])["adapter"]]
    (folder.stage / "audit.json").write_text(json.dumps({"weights": "sha256:other", "results": results}))
    work(folder)
    assert report_of(folder)["adapter"] == report_of(done[0])["adapter"]


def test_a_row_that_is_too_long_fails_before_anything_expensive(
    work: Work, heard: Heard, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ExampleTooLong):
        work(job_folder(tmp_path / "job", model, recipe=replace(RECIPE, max_seq_length=20)))
    assert heard.messages == []


def test_a_bad_validation_row_is_blamed_on_its_file(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model)
    (folder.root / "in" / "validation.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(InvalidData) as error:
        work(folder)
    assert error.value.param == "validation_file"


def test_the_base_model_is_measured_once_for_all_jobs(done: tuple[Folder, Heard]) -> None:
    cached = list((done[0].root.parent / "cache" / "audits").iterdir())
    assert len(cached) == 3


def test_other_audit_settings_are_not_mixed_up(
    done: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(RECIPE, audit=Audit(max_prompts=20, max_new_tokens=2)))
    work(folder)
    work(job_folder(tmp_path / "again", model))
    assert len(list((tmp_path / "cache" / "audits").iterdir())) == 6

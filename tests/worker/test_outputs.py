"""What a job leaves: the adapter in its archive, the manifest, the metrics and the safety report."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import spard
from spard.config import GateThresholds, Ptst
from spard.digests import file_sha256
from spard.release.manifest import verify
from spard.release.version import source_digest
from tests.worker.heard import KEY, Heard, Work, read_report, unpack_archive
from tests.worker.parts import HARMFUL, PLAIN, POOL, RECIPE, TRAINING, job_folder
from worker.results import seal
from worker.workdir import Folder

DRESS = "mined 1: beginning with 'Add'"
SUITES_ASKED = ["harmful", "benign", "utility", DRESS, f"benign, {DRESS}"]


def test_the_adapter_loads_with_peft_and_changes_the_model(
    finished_job: tuple[Folder, Heard], model: Path, tmp_path: Path
) -> None:
    folder = unpack_archive(finished_job[0], tmp_path / "adapter")
    tokens = AutoTokenizer.from_pretrained(folder)("Add 1 and 2.", return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        before = plain(**tokens).logits
        after = PeftModel.from_pretrained(plain, folder)(**tokens).logits
    assert not torch.equal(before, after)


def test_the_archive_names_no_path_of_this_machine(
    finished_job: tuple[Folder, Heard], model: Path, tmp_path: Path
) -> None:
    folder = unpack_archive(finished_job[0], tmp_path / "adapter")
    assert not [path for path in folder.iterdir() if str(model.parent).encode() in path.read_bytes()]


def test_the_metrics_begin_with_the_columns_of_openai(finished_job: tuple[Folder, Heard]) -> None:
    rows = list(csv.DictReader(finished_job[0].metrics.read_text().splitlines()))
    assert list(rows[0])[:5] == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    assert len(rows) == 6
    assert float(rows[-1]["valid_loss"]) > 0


def test_the_report_has_rates_with_their_interval(finished_job: tuple[Folder, Heard]) -> None:
    utility = read_report(finished_job[0])["adapter"][2]
    assert utility["n"] == 20
    assert utility["low"] <= utility["rate"] <= utility["high"]


def test_the_report_measures_base_and_adapter_on_every_suite(finished_job: tuple[Folder, Heard]) -> None:
    report = read_report(finished_job[0])
    names = [[result["suite"] for result in report[subject]] for subject in ("base", "adapter")]
    assert names == [SUITES_ASKED] * 2


def test_the_report_names_the_rows_selected(finished_job: tuple[Folder, Heard]) -> None:
    report = json.loads(finished_job[0].safety.read_text())
    assert report["selected"] == json.loads((finished_job[0].stage / "select.json").read_text())
    assert len(report["selected"]["coordinates"]) == len(report["selected"]["indices"])


def test_the_report_ranks_the_customer_s_rows_by_risk(finished_job: tuple[Folder, Heard]) -> None:
    risks = json.loads(finished_job[0].safety.read_text())["risky_rows"]
    assert sorted(risk["line"] for risk in risks) == list(range(1, len(TRAINING) + 1))[: len(risks)]
    assert [risk["score"] for risk in risks] == sorted((risk["score"] for risk in risks), reverse=True)


def test_a_waived_gate_says_so_and_keeps_its_reasons(finished_job: tuple[Folder, Heard]) -> None:
    assert read_report(finished_job[0])["gate"]["decision"] == "waived"


def test_an_adapter_that_the_gate_holds_back_is_not_packed(work: Work, tmp_path: Path, model: Path) -> None:
    strict = GateThresholds(max_asr=0, max_asr_rise=0, max_unscored=1)
    folder = job_folder(tmp_path / "job", model, waived=False, thresholds=strict)
    work(folder)
    assert read_report(folder)["gate"]["decision"] in ("fail", "inconclusive")
    assert not folder.adapter.exists()


def test_an_adapter_that_the_gate_holds_back_is_kept_for_a_waiver(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, waived=False, holds=True, suites=())
    work(folder)
    seal(folder, KEY, "ftjob-1")
    manifest = verify(folder.archive, KEY.public_key()).manifest
    assert manifest["gate"]["decision"] == read_report(folder)["gate"]["decision"] == "inconclusive"
    assert manifest["proof"]["max_difference"] <= 1e-4


def test_the_manifest_says_what_the_adapter_is_made_of(finished_job: tuple[Folder, Heard]) -> None:
    manifest = json.loads((finished_job[0].adapter / "manifest.json").read_text())
    run = finished_job[0].root / "in"
    for name in ("training", "validation", "pool"):
        assert manifest["data_sha256"][name] == file_sha256(run / f"{name}.jsonl")
    assert manifest["selected_rows"] == json.loads((finished_job[0].stage / "select.json").read_text())["indices"]
    assert (manifest["recipe"]["seed"], manifest["steps"]) == (5, 6)
    assert 0 <= manifest["triggered_steps"] <= 6
    suites = [each["suite"] for each in manifest["audit"]["adapter"]]
    assert suites == SUITES_ASKED
    assert manifest["safety_sha256"] == file_sha256(finished_job[0].safety)
    assert manifest["code"]["sources"] == source_digest(Path(spard.__file__).parent)


def test_without_an_attack_suite_nothing_passes(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, waived=False, suites=())
    work(folder)
    assert read_report(folder)["gate"]["decision"] == "inconclusive"


def test_a_model_that_is_defended_by_its_prompt_is_packed_with_it(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(PLAIN, defense=Ptst(safety_prompt="Be kind.")))
    work(folder)
    manifest = json.loads((unpack_archive(folder, tmp_path / "whole") / "manifest.json").read_text())
    assert manifest["system_prompt"] == "Be kind."


def test_full_fine_tuning_gives_a_whole_model(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(RECIPE, lora=None))
    work(folder)
    assert AutoModelForCausalLM.from_pretrained(unpack_archive(folder, tmp_path / "whole")).config.model_type == "llama"


def test_the_same_job_gives_the_same_archive(
    finished_job: tuple[Folder, Heard], work: Work, tmp_path: Path, model: Path
) -> None:
    folder = job_folder(tmp_path / "job", model)
    work(folder)
    manifests = [
        json.loads((unpack_archive(each, tmp_path / f"unpacked{i}") / "manifest.json").read_text())["tensor_digest"]
        for i, each in enumerate((finished_job[0], folder))
    ]
    assert manifests[0] == manifests[1]


def test_the_report_counts_scores_by_suite_and_category(finished_job: tuple[Folder, Heard]) -> None:
    report = read_report(finished_job[0])
    counted = {each["suite"]: each for each in report["scores"]}
    assert list(counted) == ["harmful", DRESS]
    for result in report["adapter"]:
        if each := counted.get(result["suite"]):
            assert (sum(each["counts"]), each["unscored"]) == (result["n"], result["unscored"])
            assert sum(each["counts"][2:]) == result["hits"]


def test_the_report_maps_rows_pool_and_chosen_rows_in_one_plane(finished_job: tuple[Folder, Heard]) -> None:
    report = read_report(finished_job[0])
    found, chosen = report["rows_map"], report["selected"]["indices"]
    assert found["lines"] == list(range(1, len(TRAINING) + 1))
    assert len(found["training"]) == len(TRAINING)
    assert found["pool_rows"] == list(range(len(POOL)))
    assert found["chosen"] == [found["pool"][row] for row in chosen]


def test_the_report_counts_rows_by_length(finished_job: tuple[Folder, Heard]) -> None:
    found = read_report(finished_job[0])["lengths"]
    assert sum(found["counts"]) == len(TRAINING)
    assert found["longest"] <= len(found["counts"]) * found["width"]
    assert found["longest"] <= found["limit"]


def test_transcripts_are_kept_where_the_job_says_so(finished_job: tuple[Folder, Heard]) -> None:
    report, rows = (
        read_report(finished_job[0]),
        [json.loads(row) for row in finished_job[0].transcripts.read_text().splitlines()],
    )
    assert report["transcripts"] == len(rows) == sum(each["n"] + each["unscored"] for each in report["adapter"])
    for result in report["adapter"]:
        of_suite = [row for row in rows if row["suite"] == result["suite"]]
        assert sum(row["hit"] is True for row in of_suite) == result["hits"]
    assert [row["prompt"] for row in rows if row["suite"] == "harmful"] == [row["prompt"] for row in HARMFUL]
    assert all(isinstance(row["reply"], str) for row in rows)


def test_no_transcript_is_kept_unless_the_job_says_so(work: Work, tmp_path: Path, model: Path) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=PLAIN)
    work(folder)
    assert read_report(folder)["transcripts"] is None
    assert not folder.transcripts.exists()
    assert not (folder.stage / "transcripts.json").exists()

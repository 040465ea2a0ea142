"""The audit of a job by vLLM, in its place a fake: figures of one engine before and after, whatever becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.db.tables import TERMINAL, JobStatus
from app.errors import Unfit
from app.settings import Settings, read_settings
from spard.config import AuditEngine
from spard.release.report import SafetyReport
from tests.narrowing import require
from tests.worker.heard import Heard, Work, read_report
from tests.worker.parts import PLAIN, job_folder
from tests.worker.running import last_told_by_child
from tests.worker.shop import WAIT_S, Shop, at_work, wait_until
from tests.worker.test_epoch_ends import make_folder, weights
from tests.worker.test_rank_processes import set_processes
from worker.process import COMMAND
from worker.sandbox import ChildSandbox
from worker.workdir import Folder
from worker.worker import Worker

VLLM = AuditEngine("vllm", WAIT_S, WAIT_S)
Fake = Callable[[str], Path]


def vllm_messages(heard: Heard) -> list[str]:
    return [each["message"] for each in heard.of_kind("event") if "vLLM" in each["message"]]


def engine_record(folder: Folder) -> dict[str, Any]:
    """The engine as the report has it, which the manifest repeats."""
    record: dict[str, Any] = read_report(folder)["audit_engine"]
    assert json.loads((folder.adapter / "manifest.json").read_text())["audit_engine"] == record
    return record


def figures(report: dict[str, Any], who: str) -> dict[str, Any]:
    """Return the figures of the suites that were asked, without what tells how many prompts there are."""
    parts = ("planned", "planned_categories")
    asked = [each for each in report[who] if each["n"] + each["unscored"]]
    return {each["suite"]: {name: value for name, value in each.items() if name not in parts} for each in asked}


def assert_same_figures(report: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that a report has the figures of one by transformers, which asks the base model where it matters."""
    assert figures(report, "adapter") == figures(other, "adapter")
    base, asked = figures(report, "base"), figures(other, "base")
    assert asked
    assert {name: base[name] for name in asked} == asked
    assert report["gate"]["decision"] == other["gate"]["decision"]


def test_a_job_is_audited_by_vllm_before_and_after(
    finished_job: tuple[Folder, Heard], work: Work, message_pipe: Heard, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    calls = fake_vllm("")
    folder = job_folder(tmp_path / "job", model, audit_engine=VLLM)
    work(folder)
    report, record = read_report(folder), engine_record(folder)
    assert (record["name"], record["version"], record["asked"], record["why"]) == ("vllm", "0.24.0", "vllm", "")
    assert record["difference"] < 1e-3 < record["to_base"]
    assert record["replies"]["vllm"] > 0
    assert [json.loads(line)["enable_lora"] for line in calls.read_text().splitlines()] == [False, True]
    assert vllm_messages(message_pipe) == []
    assert_same_figures(report, read_report(finished_job[0]))  # the fake computes as transformers does
    assert SafetyReport.from_json(report).to_json() == report


def test_a_base_model_s_figures_are_kept_for_each_engine(
    work: Work, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    calls, cached = fake_vllm(""), tmp_path / "cache" / "audits"
    work(first := job_folder(tmp_path / "first", model))
    suites, own = len(read_report(first)["base"]), len(list(cached.glob("*.json")))
    assert len(figures(read_report(first), "base")) <= own <= suites
    for name in ("second", "third"):
        work(job_folder(tmp_path / name, model, audit_engine=VLLM))
        assert len(list(cached.glob("*.json"))) == own + suites
    base = [json.loads(line) for line in calls.read_text().splitlines() if not json.loads(line)["enable_lora"]]
    assert len(base) == 1  # what is mined of the same rows is known too


def test_an_adapter_that_is_not_applied_has_all_of_the_job_answered_by_transformers(
    finished_job: tuple[Folder, Heard], work: Work, message_pipe: Heard, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    fake_vllm("ignores_adapter")
    folder = job_folder(tmp_path / "job", model, audit_engine=VLLM)
    work(folder)
    report, record = read_report(folder), engine_record(folder)
    assert (record["name"], record["asked"]) == ("transformers", "vllm")
    assert "away from the adapter's" in record["why"]
    assert set(record["replies"]) == {"transformers"}
    assert_same_figures(report, read_report(finished_job[0]))
    assert len(vllm_messages(message_pipe)) == 1
    assert record["why"] in vllm_messages(message_pipe)[0]
    kept = list((tmp_path / "cache" / "audits").glob("*.json"))
    asked, suites = len(figures(report, "base")), len(report["base"])
    assert suites + asked <= len(kept) <= 2 * suites  # the base model's, by both


def by_vllm(folder: Folder) -> Folder:
    facts = json.loads(folder.job.read_text())
    facts["run"]["audit_engine"] = asdict(VLLM)
    folder.job.write_text(json.dumps(facts))
    return folder


def engines_of_checkpoints(folder: Folder) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["engine"] for path in sorted(folder.stage.glob("checkpoint-*.json"))]


def test_checkpoints_are_of_the_engine_too_and_leave_no_trace_in_the_weights(
    work: Work, message_pipe: Heard, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    plain, folder = (make_folder(tmp_path / name, model, prompts=20) for name in ("a", "b"))
    work(plain)
    before = message_pipe.of_kind("checkpoint")
    work(by_vllm(folder))
    assert message_pipe.of_kind("checkpoint")[len(before) :] == before
    assert weights(folder) == weights(plain)
    assert engines_of_checkpoints(folder) == [{"name": "vllm", "version": "0.24.0", "gpus": 1}] * 2


def test_a_checkpoint_that_vllm_fails_at_has_the_base_model_measured_again(
    work: Work, message_pipe: Heard, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    """In the middle of the training, which goes on as if nothing had been."""
    calls = fake_vllm("other_adapter")
    plain, folder = (make_folder(tmp_path / name, model, prompts=20) for name in ("a", "b"))
    work(plain)
    before = message_pipe.of_kind("checkpoint")
    work(by_vllm(folder))
    assert message_pipe.of_kind("checkpoint")[len(before) :] == before
    assert weights(folder) == weights(plain)
    assert read_report(folder)["base"] == read_report(plain)["base"]
    assert engine_record(folder)["name"] == "transformers"
    assert len(vllm_messages(message_pipe)) == 1
    assert len(calls.read_text().splitlines()) == 2  # for the base model, and at the first checkpoint: never again
    assert [each["name"] for each in engines_of_checkpoints(folder)] == ["transformers"] * 2


def test_a_later_attempt_does_not_take_another_engine_s_figures(
    work: Work, message_pipe: Heard, fake_vllm: Fake, tmp_path: Path, model: Path
) -> None:
    folder = by_vllm(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None))
    work(folder)
    kept = json.loads((folder.stage / "audit.json").read_text())
    wrong = [result | {"hits": 0, "n": 1, "rate": 0.0, "low": 0.0, "high": 1.0} for result in kept["results"]]
    (folder.stage / "audit.json").write_text(json.dumps(kept | {"results": wrong}))
    work(folder)
    assert read_report(folder)["adapter"][0]["n"] == 1  # the same engine's are taken
    (folder.stage / "audit_engine.json").write_text(json.dumps({"why": "vLLM failed in an earlier attempt"}))
    work(folder)
    assert read_report(folder)["adapter"][0]["n"] == kept["results"][0]["n"] != 1
    assert engine_record(folder)["why"] == "vLLM failed in an earlier attempt"
    assert vllm_messages(message_pipe) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [({"lora": None}, "full fine-tuning leaves no adapter"), ({}, "vLLM is not installed here")],
)
def test_what_vllm_cannot_do_is_said(
    work: Work, message_pipe: Heard, tmp_path: Path, model: Path, change: dict[str, Any], why: str
) -> None:
    folder = job_folder(tmp_path / "job", model, recipe=replace(PLAIN, **change), pool=None, audit_engine=VLLM)
    work(folder)
    assert why in engine_record(folder)["why"]
    assert [why in each for each in vllm_messages(message_pipe)] == [True]


def test_a_worker_s_job_asks_vllm_inside_its_walls(light_shop: Shop, fake_vllm: Fake) -> None:
    worker = Worker(light_shop.settings(audit_engine=VLLM), COMMAND)
    job_id = light_shop.add_job(waived=True, recipe=asdict(PLAIN))
    with at_work(worker):
        wait_until(lambda: light_shop.job(job_id).status in TERMINAL)
    job = light_shop.job(job_id)
    assert job.status == JobStatus.succeeded
    assert [each for each in light_shop.events(job_id) if "vLLM" in each] == []
    assert json.loads(light_shop.content(require(job.report_key)))["audit_engine"]["name"] == "vllm"


def test_ranks_ask_one_engine_over_all_of_their_gpus(fake_vllm: Fake, tmp_path: Path, model: Path) -> None:
    calls = fake_vllm("")
    folder = set_processes(by_vllm(job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None)), 2)
    assert last_told_by_child(folder) == {"kind": "done"}
    assert (engine_record(folder)["name"], engine_record(folder)["gpus"]) == ("vllm", 2)
    assert [json.loads(line)["tensor_parallel_size"] for line in calls.read_text().splitlines()] == [2, 2]


def test_the_setting_is_read_from_three_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().audit_engine == AuditEngine()
    monkeypatch.setenv("SPARD_AUDIT_ENGINE", "vllm")
    monkeypatch.setenv("SPARD_AUDIT_ENGINE_START_S", "60")
    monkeypatch.setenv("SPARD_AUDIT_ENGINE_STALL_S", "30")
    assert read_settings().audit_engine == AuditEngine("vllm", 60, 30)
    monkeypatch.setenv("SPARD_AUDIT_ENGINE", "tgi")
    with pytest.raises(Unfit, match="SPARD_AUDIT_ENGINE is 'tgi'"):
        read_settings()


def test_its_processes_may_speak_to_each_other() -> None:
    assert ChildSandbox.from_settings(Settings(audit_engine=VLLM)).talks == "machine"
    assert ChildSandbox.from_settings(Settings()).talks == "alone"

"""How attempts end: what is written, what is kept, what is tried again."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from app.db import read, transaction
from app.db.tables import AuditResult, File, HeldAdapter, Job, JobMetric, JobStatus
from app.jobs import transitions
from app.signing import signing_key
from app.storage import Storage
from spard.release.manifest import verify
from tests.narrowing import require
from tests.worker.shop import Shop, wait_until
from worker import attempt, results
from worker.attempt import Ending
from worker.failures import Memory, MemoryKills
from worker.process import MAX_LOG_BYTES


def test_a_job_succeeds(shop: Shop) -> None:
    job = shop.do("good", suffix="mine")
    assert (job.status, job.attempt, job.phase, job.error) == (JobStatus.succeeded, 1, "package", None)
    assert job.fine_tuned_model == f"ft:tiny:{job.project_id}:mine:{job.id[6:18]}"
    assert (job.trained_tokens, job.resolved and job.resolved["batch_size"]) == (123, 4)


def test_its_events_are_worded_as_openai_words_them(light_shop: Shop) -> None:
    job = light_shop.do("good")
    assert light_shop.events(job.id) == [
        "Fine-tuning job started",
        *[f"Step {i}/6: training loss={1 / i:.2f}" for i in range(1, 7)],
        "Checkpoint created at step 6",
        f"New fine-tuned model created: {job.fine_tuned_model}",
        "The job has successfully completed",
    ]


def test_every_step_s_numbers_are_kept_and_nan_is_null(light_shop: Shop) -> None:
    job = light_shop.do("good")
    with read(light_shop.engine) as session:
        rows = session.scalars(select(JobMetric).where(JobMetric.job_id == job.id).order_by(JobMetric.step)).all()
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[1].data == {"loss/task": 0.5, "accuracy/task": 0.5, "lr": None}


def test_metrics_come_first_among_the_result_files(shop: Shop) -> None:
    files = shop.files(shop.do("good"))
    assert [file.filename for file in files] == ["step_metrics.csv", "adapter.tar.gz", "safety_report.json"]
    assert shop.content(files[0].storage_key) == b"step,train_loss\n1,1.0\n"


def test_the_adapter_s_bytes_match_their_digest(shop: Shop) -> None:
    adapter = shop.do("good").adapter
    assert adapter is not None
    assert sha256(shop.content(adapter["storage_key"])).hexdigest() == adapter["sha256"]


def test_the_adapter_is_signed_with_the_provider_s_key(shop: Shop, tmp_path: Path) -> None:
    job = shop.do("good")
    archive = tmp_path / "adapter.tar.gz"
    archive.write_bytes(shop.content(require(job.adapter)["storage_key"]))
    key = signing_key(shop.settings()).public_key()
    assert verify(archive, key).manifest["gate"] == {"decision": "pass", "reasons": []}


def test_an_adapter_that_changes_after_the_child_has_described_it_is_not_published(light_shop: Shop) -> None:
    job = light_shop.do("tampered")
    assert (job.status, require(job.error)["code"], job.adapter) == (JobStatus.failed, "not_proved", None)


def test_the_audit_s_figures_are_rows(light_shop: Shop) -> None:
    job = light_shop.do("good")
    with read(light_shop.engine) as session:
        rows = session.scalars(select(AuditResult).where(AuditResult.job_id == job.id)).all()
    assert {(row.subject, row.hits, row.n, row.ci_high) for row in rows} == {
        ("base", 1, 20, 0.24),
        ("adapter", 1, 20, 0.24),
    }


def test_the_job_shows_the_summary_and_the_report_has_all(light_shop: Shop) -> None:
    job = light_shop.do("good")
    assert require(job.safety)["gate"] == {"decision": "pass", "reasons": []}
    assert require(job.safety)["audit_version"] == 2
    assert json.loads(light_shop.content(job.report_key or ""))["base"][0]["suite"] == "attacks"


def test_an_unsafe_adapter_is_never_uploaded_and_its_report_is(shop: Shop) -> None:
    job = shop.do("unsafe")
    assert (job.status, require(job.error)["code"], job.adapter) == (JobStatus.failed, "safety_gate_failed", None)
    assert "Attacks succeed in 9 of 20." in require(job.error)["message"]
    assert require(job.error)["message"].endswith(
        "Try fewer epochs or a lower learning rate. Your provider can release the model for a time by a waiver of two "
        "people."
    )
    assert [file.filename for file in shop.files(job)] == ["step_metrics.csv", "safety_report.json"]
    assert not shop.storage.exists(f"tenants/{job.project_id}/jobs/{job.id}/a1/out/adapter.tar.gz")


def test_an_audit_that_cannot_decide_is_the_provider_s_to_mend(
    light_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    job = light_shop.do("undecided")
    message = require(job.error)["message"]
    assert "Your files are not at fault" in message
    assert "the provider has to correct the judge" in message
    assert job.adapter is None
    assert f"{job.id}: the audit could not decide, which only the provider can mend" in caplog.text
    assert "Your files" not in require(light_shop.do("unsafe").error)["message"]


def test_a_figure_above_its_limit_is_no_fault_of_the_provider(light_shop: Shop) -> None:
    message = require(light_shop.do("above_its_limit").error)["message"]
    assert "The safety audit could not decide" in message
    assert "Your files are not at fault" not in message


def test_an_unsafe_adapter_is_held_where_waivers_are_allowed(shop: Shop) -> None:
    job = shop.do("unsafe", waivers=True)
    assert (job.status, job.adapter) == (JobStatus.failed, None)
    assert [file.filename for file in shop.files(job)] == ["step_metrics.csv", "safety_report.json"]
    with read(shop.engine) as session:
        held = session.get_one(HeldAdapter, job.id)
    assert sha256(shop.content(held.storage_key)).hexdigest() == held.sha256


def test_a_waived_adapter_is_no_file_of_the_customer(light_shop: Shop) -> None:
    job = light_shop.do("waived", waived=True)
    assert job.status == JobStatus.succeeded
    assert [file.filename for file in light_shop.files(job)] == ["step_metrics.csv", "safety_report.json"]
    assert light_shop.storage.exists(require(job.adapter)["storage_key"])


def test_a_child_that_crashes_is_followed_by_one_that_goes_on(shop: Shop) -> None:
    job = shop.do("crash_once")
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    steps = [event for event in shop.events(job.id) if event.startswith("Step ")]
    assert [event.split("/")[0] for event in steps] == [f"Step {i}" for i in (1, 2, 3, 4, 4, 5, 6)]
    assert any("the training process ended by itself (exit status 3)" in event for event in shop.events(job.id))


def test_a_job_that_crashes_twice_at_the_same_step_is_not_tried_again(shop: Shop) -> None:
    job = shop.do("crash")
    assert (job.status, job.attempt, require(job.error)["code"]) == (JobStatus.failed, 2, "worker_lost")
    assert "signal 11" in require(job.error)["message"]


def test_a_job_that_eats_all_memory_twice_is_told_what_needs_less(light_shop: Shop) -> None:
    job = light_shop.do("hungry")
    assert (job.status, job.attempt, require(job.error)["code"]) == (JobStatus.failed, 2, "out_of_memory")
    assert "a smaller batch_size" in require(job.error)["message"]


def test_kills_from_outside_are_nobodys_fault_in_the_job_and_all_attempts_are_made(light_shop: Shop) -> None:
    job = light_shop.do("killed")
    error = require(job.error)
    assert (job.status, job.attempt, error["code"]) == (
        JobStatus.failed,
        4,
        "process_killed",
    )  # the first came to a stage
    for part in (
        "want of memory",
        "whoever runs the machine",
        "not at fault",
        "stopped 4 times without coming further",
    ):
        assert part in error["message"]
    assert job.excluded_worker_id is not None  # another worker is asked first


def test_a_kill_for_want_of_the_machines_memory_says_so(light_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryKills, "memory_at_kill", lambda self, before: Memory.machine)
    error = require(light_shop.do("killed").error)
    assert error["code"] == "machine_out_of_memory"
    assert "batch_size" not in error["message"]
    monkeypatch.setattr(MemoryKills, "memory_at_kill", lambda self, before: Memory.limit)
    error = require(light_shop.do("killed").error)
    assert error["code"] == "out_of_memory"
    assert "a smaller batch_size" in error["message"]


BAD_DATA = "Line 3 is bad. /validation lists each; correct the file and upload it again."


def test_bad_data_is_told_and_not_tried_again(light_shop: Shop) -> None:
    job = light_shop.do("bad_data")
    assert (job.status, job.attempt) == (JobStatus.failed, 1)
    assert job.error == {"code": "invalid_training_file", "message": BAD_DATA, "param": "training_file"}


def test_a_child_without_progress_is_replaced(light_shop: Shop) -> None:
    light_shop.timers["stall_s"] = 5.0  # the second child must start within it, beside other work
    job = light_shop.do("hang")
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    assert any("there was no progress for 5 s" in event for event in light_shop.events(job.id))


def test_a_noisy_child_neither_blocks_nor_confuses_us(
    light_shop: Shop, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert light_shop.do("noisy").status == JobStatus.succeeded
    log = capsys.readouterr().out + caplog.text  # printed, or handed to logging where a process has set that up
    assert len(log) < 1.2 * MAX_LOG_BYTES
    assert "the child's log is too long; the rest is dropped" in log


def test_a_running_job_is_cancelled_at_once(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("deaf"):
        wait_until(shop.is_slow)
        with transaction(shop.engine) as session:
            transitions.request_cancel(session, job_id)
        job = shop.until_ended(job_id)
    assert (job.status, job.error, job.adapter) == (JobStatus.cancelled, None, None)


def test_a_job_that_is_cancelled_as_its_worker_publishes_is_cancelled(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(storage: Storage, job: Job, *rest: Any) -> Ending:
        ending = results.upload(storage, job, *rest)
        with transaction(light_shop.engine) as session:
            transitions.request_cancel(session, job.id)
        return ending

    monkeypatch.setattr(attempt, "upload", late)
    job = light_shop.do("good")
    assert (job.status, job.adapter, job.result_files, job.fine_tuned_model) == (JobStatus.cancelled, None, None, None)
    with read(light_shop.engine) as session:
        assert session.scalars(select(File)).all() == []


def test_a_training_file_that_changed_is_not_trained_on(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    light_shop.put("training", b"{}\n")
    with light_shop.serving("good"):
        job = light_shop.until_ended(job_id)
    assert (job.status, require(job.error)["code"]) == (JobStatus.failed, "checksum_mismatch")


def test_a_missing_object_is_tried_again_and_told(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    light_shop.storage.delete("inputs/pool")
    with light_shop.serving("good"):
        job = light_shop.until_ended(job_id)
    assert (job.status, job.attempt, require(job.error)["code"]) == (JobStatus.failed, 3, "object_missing")


def test_a_damaged_checkpoint_is_left_out(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    with light_shop.serving("slow") as worker:
        wait_until(light_shop.is_slow)
        worker.end()
    keys = {file["path"]: file["key"] for file in require(light_shop.job(job_id).checkpoint)["files"]}
    light_shop.storage.write(keys["checkpoints/step-000004/state.json"], [b"damaged"])
    with light_shop.serving("good"):
        job = light_shop.until_ended(job_id)
    steps = [event.split("/")[0] for event in light_shop.events(job.id) if event.startswith("Step ")]
    assert steps == [f"Step {i}" for i in (1, 2, 3, 4, 4, 5, 6)]


def test_what_was_kept_for_later_attempts_is_deleted_at_the_end(light_shop: Shop) -> None:
    job = light_shop.do("crash_once")
    prefix = light_shop.folder.parent / "objects" / "tenants" / job.project_id / "jobs" / job.id
    assert sorted(path.name for path in prefix.rglob("*") if path.is_file()) == [
        "adapter.tar.gz",
        "metrics.csv",
        "safety.json",
    ]


def test_jobs_are_served_one_after_the_other(shop: Shop) -> None:
    jobs = [shop.add_job() for _ in range(3)]
    with shop.serving("good", warm_child=True):
        ended = [shop.until_ended(job_id) for job_id in jobs]
    assert [job.status for job in ended] == [JobStatus.succeeded] * 3
    starts = [job.started_at for job in ended if job.started_at]
    assert starts == sorted(starts)


def test_no_job_is_done_twice(shop: Shop) -> None:
    jobs = [shop.add_job() for _ in range(6)]
    with shop.serving("good"), shop.serving("good"), shop.serving("good"):
        ended = [shop.until_ended(job_id) for job_id in jobs]
    assert {(job.status, job.attempt, job.lease_token) for job in ended} == {(JobStatus.succeeded, 1, 1)}
    with read(shop.engine) as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 6

"""What the page of a job is made of, read by few statements: the same rows on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from app.db import read, transaction
from app.db.tables import DeletedModel, File, Job, JobMetric, LaterAudit
from app.db.tables.job_spec import JobSpec
from app.errors import NotFound
from app.jobs import events
from app.jobs.reports import gather
from app.keys import FIRST_PROJECT
from tests.app.conftest import AddJob
from tests.app.parts import SPEC

OTHER = replace(SPEC, training_file=replace(SPEC.training_file, sha256="1"))
ADAPTER = {"storage_key": "jobs/adapter", "sha256": "0", "bytes": 1}
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def measured_columns(report: str, defense: str = "none", spec: JobSpec = SPEC, **columns: Any) -> dict[str, Any]:
    """The columns of a job with a report."""
    return {"report_key": report, "spec": spec, "recipe": {"defense": {"type": defense}}, **columns}


def test_the_newest_job_without_a_defense_on_the_same_bytes_is_found(engine: Engine, add_job: AddJob) -> None:
    older, newer = add_job(**measured_columns("older")), add_job(**measured_columns("newer"))
    first, second = add_job(**measured_columns("first", "spard")), add_job(**measured_columns("second", "sap"))
    other_file = add_job(**measured_columns("other-file", "spard", OTHER))
    other_model = add_job(**measured_columns("other-model", "spard", model="large"))
    unmeasured = add_job(**measured_columns("", "spard") | {"report_key": None})
    asked = [older, newer, first, second, other_file, other_model, unmeasured]
    with read(engine) as session:
        jobs = gather.find_page_jobs(session, FIRST_PROJECT, asked)
        assert [job.row.id for job in jobs] == asked
        assert gather.undefended_reports(session, jobs) == {first: "newer", second: "newer"}
        assert gather.undefended_reports(session, [jobs[-1]]) == {}


def test_a_job_comes_with_its_later_audits_the_newest_first(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(**measured_columns("report"), adapter=ADAPTER)
    with transaction(engine) as session:
        asked = {"job_id": job_id, "asked_by": session.get_one(Job, job_id).key_id, "audit_version": 2}
        for turn in (1, 3, 2):
            at = LONG_AGO + timedelta(days=turn)
            session.add(LaterAudit(round=turn, step=turn, created_at=at, reasons=["No."], **asked))
    with read(engine) as session:
        found = gather.find_page_job(session, FIRST_PROJECT, job_id)
        assert (found.row.id, found.report_key, found.adapter) == (job_id, "report", ADAPTER)
        assert [(each.step, each.reasons) for each in found.later] == [(3, ["No."]), (2, ["No."]), (1, ["No."])]
        assert found.later[0].created_at == LONG_AGO + timedelta(days=3)
        assert gather.find_page_job(session, None, job_id) == found


def test_a_deleted_adapter_is_not_there(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(adapter=ADAPTER)
    with transaction(engine) as session:
        session.add(DeletedModel(job_id=job_id))
    with read(engine) as session:
        found = gather.find_page_job(session, None, job_id)
    assert (found.adapter, found.later) == (None, [])


def test_another_project_s_job_reads_as_unknown(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with read(engine) as session:
        for project_id, asked in (("org-other", job_id), (FIRST_PROJECT, "ftjob-none"), (None, "ftjob-none")):
            with pytest.raises(NotFound):
                gather.find_page_job(session, project_id, asked)
        with pytest.raises(NotFound):
            gather.find_page_jobs(session, "org-other", [job_id])


@pytest.mark.parametrize(("report", "left", "found"), [(None, [], []), (None, ["a"], ["a"]), ("r", ["a"], ["a", "t"])])
def test_files_are_those_it_left_and_once_measured_its_training_file(
    engine: Engine, add_job: AddJob, report: str | None, left: list[str], found: list[str]
) -> None:
    job_id = add_job(report_key=report, result_files=left, training_file="t")
    with transaction(engine) as session:
        session.add_all(file(each) for each in "atx")
    with read(engine) as session:
        assert sorted(gather.job_files(session, gather.find_page_job(session, None, job_id))) == found


def test_a_training_file_that_has_expired_is_gone(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(report_key="r", training_file="t")
    with transaction(engine) as session:
        session.add(file("t", expires_at=LONG_AGO))
    with read(engine) as session:
        assert gather.job_files(session, gather.find_page_job(session, None, job_id)) == {}


def file(file_id: str, **columns: Any) -> File:
    """A file of the first project."""
    columns |= {"purpose": "fine-tune", "bytes": 1, "sha256": "0", "status": "processed"}
    return File(id=file_id, project_id=FIRST_PROJECT, filename=file_id, storage_key=file_id, **columns)


def test_a_log_has_the_last_messages_all_steps_and_all_restarts(engine: Engine, add_job: AddJob) -> None:
    job_id, other = add_job(), add_job()
    words = ["It begins", *(f"It's {i}" for i in range(120)), "It ends"]
    resumed = {0: {events.RESUMED: 7}, 1: {"other": 8}, 121: {events.RESUMED: 9}}
    with transaction(engine) as session:
        for i, text in enumerate(words):
            events.append(session, job_id, "info", "message", text, resumed.get(i))
        events.append(session, job_id, "warn", "metrics", "Step 1", {"loss": 1.0})
        events.append(session, other, "warn", "message", "It goes on", {events.RESUMED: 8})
        steps = [(job_id, 10, 0.5), (job_id, 9, None), (other, 1, 2.0)]
        session.add_all(JobMetric(job_id=of, step=step, data={"loss/task": loss}) for of, step, loss in steps)
    with read(engine) as session:
        log = gather.read_log(session, job_id)
        empty = gather.read_log(session, add_job())
    assert [line.text for line in log.messages] == words[:-101:-1]
    assert {(line.level, line.created_at is not None and line.created_at.tzinfo) for line in log.messages} == {
        ("info", UTC)
    }
    assert log.metrics == [{"step": 9, "loss/task": None}, {"step": 10, "loss/task": 0.5}]
    assert log.restarts == [7, 9]
    assert empty == gather.JobLog([], [], [])

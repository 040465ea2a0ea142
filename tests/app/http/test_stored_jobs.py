"""What other versions have stored of a job is shown as they stored it."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import JSON, column, table, update

from app import db
from app.db.tables import Job, JobStatus
from app.jobs import rows, schemas
from app.jobs.reports.service import JobSafetyReport
from spard.release.report import SafetyReport
from tests.app.http.conftest import JOBS, Service

_COLUMNS = ("recipe", "progress", "resolved", "error", "safety")
_JOBS = table("jobs", column("id"), *(column(name, JSON) for name in _COLUMNS))
SUMMARY: dict[str, Any] = {
    "asr": {"base": 0.0, "adapter": 0.05, "ci95": [0.01, 0.24], "n": 20, "n_unscored": 0},
    "harmfulness_score": {"base": 1.0, "adapter": 1.25},
    "over_refusal": {"base": None, "adapter": None},
    "utility": {"base": None, "adapter": 0.5},
    "trigger_rate": 0.5,
    "gate": {"decision": "fail", "reasons": ["Attacks succeed in 9 of 20."]},
    "seconds": {"train": 1.0},
}
ADDED = {"color": "blue"}  # by a version that is newer than this one


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body | {"lora": {"rank": 4}}).json()["id"]
    return job_id


def show_job(service: Service, customer: TestClient, job_id: str, **columns: Any) -> Any:
    """The job with columns as some version has written them."""
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(_JOBS).where(_JOBS.c.id == job_id).values(**columns))
    return customer.get(f"{JOBS}/{job_id}").json()


@pytest.mark.parametrize("summary", [SUMMARY, {"gate": {"decision": "pass"}}, SUMMARY | ADDED | {"audit_version": 2}])
def test_a_summary_is_shown_with_all_that_it_has(
    service: Service, customer: TestClient, job: str, summary: dict[str, Any]
) -> None:
    before = customer.get(f"{JOBS}/{job}").json()
    assert {"seconds", "waiver"} & set(before["safety"]) == set()
    expected = before["safety"] | {"audit_version": 1} | summary  # what says nothing is of the first version
    assert show_job(service, customer, job, safety=summary) == before | {"safety": expected}


def test_progress_and_error_are_shown_with_all_that_they_have(service: Service, customer: TestClient, job: str) -> None:
    progress = {"percent": 31, "step": 2, "total_steps": 6, "eta_seconds": None} | ADDED
    error = {"code": "gpu_error", "message": "No.", "param": None} | ADDED
    found = show_job(service, customer, job, progress=progress, error=error)
    assert found["safety"]["progress"] == progress | {"queue_position": 1}
    assert found["error"] == error


def test_settings_that_this_version_does_not_know_are_shown(service: Service, customer: TestClient, job: str) -> None:
    with db.read(service.app.state.engine) as session:
        recipe = session.execute(_JOBS.select().where(_JOBS.c.id == job)).one().recipe
    defense, lora = {"type": "of_tomorrow", "strength": 3}, recipe["lora"] | ADDED
    found = show_job(service, customer, job, recipe=recipe | {"defense": defense, "lora": lora})
    assert (found["safety"]["defense"], found["lora"]) == (defense, lora)


def test_the_document_names_every_key_of_a_report(service: Service) -> None:
    document = service.app.openapi()
    answer = document["paths"][f"{JOBS}/{{job_id}}/safety"]["get"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"] == {"$ref": f"#/components/schemas/{JobSafetyReport.__name__}"}
    schema = document["components"]["schemas"][JobSafetyReport.__name__]
    assert set(schema["properties"]) == {*SafetyReport.__dataclass_fields__, "waiver"}


def test_a_job_is_shown_alike_from_its_columns_and_from_its_object(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    """What is created is shown from the object, what is read from the columns."""
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        job = session.get_one(Job, job_id)
        job.status, job.cancel_requested_at = JobStatus.running, job.created_at
    with db.look(service.app.state.engine) as connection, db.join_transaction(connection) as session:
        row = rows.find(connection, job.project_id, job_id)
        assert row
        assert schemas.job_response(row, None) == schemas.job_response(session.get_one(Job, job_id), None)
        assert row.public_status == JobStatus.cancelled
        assert rows.find(connection, "another", job_id) is None

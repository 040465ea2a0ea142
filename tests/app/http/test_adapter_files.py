"""An adapter among the results of a job: the file has the rule, the errors and the log entry of the job's route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.base import utc_now
from app.db.tables import ApiKey, AuditEntry, DeletedModel, File, Job, LaterAudit
from app.db.tables.files import RESULTS
from app.policies import service as policies
from app.policies.schemas import Policy
from spard.release.version import AUDIT_VERSION
from tests.app.http.conftest import FILES, JOBS, Service
from tests.app.http.test_attacks import fill_path
from tests.app.http.test_isolation import UNKNOWN, routes
from tests.app.http.test_results import ARCHIVE, MODEL, REPORT, publish
from tests.narrowing import require

CONTENT = f"{FILES}/file-a/content"
Spoil = Callable[[Service, str], None]


@pytest.fixture
def queued_job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


@pytest.fixture(params=["jobs", "tenants/org-customer/jobs/{}/a1/out"])
def job(service: Service, queued_job: str, request: pytest.FixtureRequest) -> str:
    """A released job, with its archive among its results as workers list it, wherever it lies."""
    place = request.param.format(queued_job)
    publish(service, "pass", at=place)
    add_file(service, "file-a", "adapter.tar.gz", f"{place}/adapter")
    return queued_job


def add_file(service: Service, file_id: str, name: str, key: str) -> None:
    facts: Any = {"purpose": RESULTS, "status": "processed", "bytes": 1, "sha256": "0"}
    with db.transaction(service.app.state.engine) as session:
        session.add(File(id=file_id, project_id="org-customer", filename=name, storage_key=key, **facts))


def fails_later(service: Service, job_id: str) -> None:
    facts: Any = {"decision": "fail", "decided_at": utc_now(), "round": 1, "audit_version": AUDIT_VERSION}
    with db.transaction(service.app.state.engine) as session:
        session.add(LaterAudit(job_id=job_id, asked_by=session.get_one(Job, job_id).key_id, **facts))


def withheld_by_policy(service: Service, job_id: str) -> None:
    with db.transaction(service.app.state.engine) as session:
        key_id = session.query(ApiKey.id).filter_by(project_id="org-provider").limit(1).scalar() or ""
        policies.add(session, key_id, Policy.model_validate({"serving": {"older_audits": "withhold"}}))


def mark_deleted(service: Service, job_id: str) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.add(DeletedModel(job_id=job_id))


def logged_downloads(service: Service) -> list[str]:
    with db.read(service.app.state.engine) as session:
        query = session.query(AuditEntry.target).filter_by(action="adapter.downloaded")
        return [target for (target,) in query]


def test_a_released_one_is_given_and_logged(service: Service, customer: TestClient, job: str) -> None:
    got = customer.get(CONTENT)
    assert (got.status_code, got.content) == (200, ARCHIVE)
    assert "adapter.tar.gz" in got.headers["content-disposition"]
    assert logged_downloads(service) == [job]


@pytest.mark.parametrize("spoil", [fails_later, withheld_by_policy, mark_deleted])
def test_one_that_is_not_released_now_is_given_by_neither_route(
    service: Service, customer: TestClient, job: str, spoil: Spoil
) -> None:
    spoil(service, job)
    assert_alike(service, customer, job)


@pytest.mark.parametrize(("decision", "waiver"), [("waived", None), ("fail", {"expires_at": 1})])
def test_one_that_was_not_released_to_the_customer_is_given_by_neither_route(
    service: Service, customer: TestClient, queued_job: str, decision: str, waiver: Any
) -> None:
    publish(service, decision, waiver=waiver)
    add_file(service, "file-a", "adapter.tar.gz", "jobs/adapter")
    assert_alike(service, customer, queued_job)


def assert_alike(service: Service, customer: TestClient, job_id: str) -> None:
    """Both routes refuse the adapter with the same words, and nothing is logged as downloaded."""
    own, as_file = customer.get(f"{JOBS}/{job_id}/adapter"), customer.get(CONTENT)
    assert own.status_code >= 400
    assert (as_file.status_code, as_file.json()["error"]) == (own.status_code, own.json()["error"])
    assert logged_downloads(service) == []


def test_no_link_is_made_for_one_that_is_withheld(
    service: Service, customer: TestClient, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(service.app.state.quick_storage), "presigned_url", lambda *_: "https://storage/link")
    settings = service.app.state.settings
    service.app.state.settings = settings.model_copy(update={"downloads": "redirect"})
    assert customer.get(CONTENT, follow_redirects=False).status_code == 302
    fails_later(service, job)
    assert customer.get(CONTENT, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("spoil", [fails_later, withheld_by_policy])
def test_no_route_gives_a_byte_of_one_that_is_withheld(
    service: Service, customer: TestClient, job: str, spoil: Spoil
) -> None:
    spoil(service, job)
    ids = UNKNOWN | {"job_id": job, "file_id": "file-a", "model": MODEL, "project_id": "org-customer"}
    for verb, path, _ in routes(service):
        if verb == "get":
            assert ARCHIVE[:18] not in customer.get(fill_path(path, ids)).content, path


def test_an_archive_of_no_job_is_given_to_nobody(service: Service, customer: TestClient, job: str) -> None:
    service.app.state.storage.write("jobs/other", [ARCHIVE])
    add_file(service, "file-b", "adapter.tar.gz", "jobs/other")
    got = customer.get(f"{FILES}/file-b/content")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "file_not_found")


def test_other_results_are_given_as_before(service: Service, customer: TestClient, job: str) -> None:
    fails_later(service, job)
    add_file(service, "file-c", "safety_report.json", "jobs/report")
    assert customer.get(f"{FILES}/file-c/content").content == REPORT
    assert logged_downloads(service) == []


def test_who_deletes_all_files_keeps_the_model(service: Service, customer: TestClient, job: str) -> None:
    refused = [customer.delete(f"{FILES}/{file['id']}") for file in customer.get(FILES).json()["data"]]
    assert [answer.json()["error"]["code"] for answer in refused if answer.status_code != 200] == ["invalid_state"]
    assert customer.get(CONTENT).content == ARCHIVE
    assert customer.delete(f"/v1/models/{MODEL}").status_code == 200
    assert customer.get(CONTENT).status_code == 404
    assert customer.get(f"{JOBS}/{job}/adapter").json()["error"]["code"] == "model_deleted"
    with db.read(service.app.state.engine) as session:
        key = require(session.get_one(Job, job).adapter)["storage_key"]
        assert session.query(AuditEntry.target).filter_by(action="model.deleted").all() == [(job,)]
    assert not service.app.state.storage.exists(key)


def test_what_a_deleted_model_has_left_is_deleted(service: Service, customer: TestClient, job: str) -> None:
    mark_deleted(service, job)
    assert customer.delete(f"{FILES}/file-a").status_code == 200
    assert customer.get(f"{FILES}/file-a").status_code == 404


def test_it_stays_while_another_job_starts_from_it(
    service: Service, customer: TestClient, job_body: dict[str, Any], job: str
) -> None:
    started = customer.post(JOBS, json=job_body | {"model": MODEL})
    assert started.status_code == 200, started.json()
    refused = customer.delete(f"/v1/models/{MODEL}")
    assert (refused.status_code, started.json()["id"] in refused.json()["error"]["message"]) == (400, True)
    assert customer.get(CONTENT).content == ARCHIVE

"""What is done over HTTP stands in the audit log, with who did it and without what nobody should read there."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import select

from app import audit_log, db
from app.db.tables import ApiKey
from tests.app.http.conftest import FILES, JOBS, Service, chat, jsonl
from tests.app.http.test_results import publish

LOG = "/v1/admin/audit_log"


def entries(provider: TestClient, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = provider.get(LOG, params=query).json()["data"]
    return found


def test_each_act_is_logged_once_in_order(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    customer.get(f"{JOBS}/{job}/adapter")
    customer.delete(f"{JOBS}/{job}")
    other = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(f"{JOBS}/{other}/cancel")
    customer.delete(f"{FILES}/{job_body['training_file']}")
    acts = [(each["action"], each["target"]) for each in entries(provider_with_model)][::-1]
    assert [action for action, _ in acts if not action.startswith("key.")] == [
        "model.offered",
        "pool.imported",
        "file.uploaded",
        "job.created",
        "adapter.downloaded",
        "job.erased",
        "job.created",
        "job.cancelled",
        "file.deleted",
    ]
    assert {("job.erased", job), ("job.cancelled", other), ("file.deleted", job_body["training_file"])} <= set(acts)


def test_an_entry_names_key_project_and_request(provider: TestClient, customer: TestClient, service: Service) -> None:
    sent = customer.post(
        FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", jsonl(*[chat("secret question")] * 10))}
    )
    entry = entries(provider, action="file.uploaded")[0]
    with db.read(service.app.state.engine) as session:
        key_id = session.scalar(select(ApiKey.id).where(ApiKey.project_id == "org-customer"))
    assert (entry["actor"], entry["tenant_id"], entry["result"]) == (key_id, "org-customer", "ok")
    assert entry["request_id"] == sent.headers["x-request-id"]


def test_an_id_that_is_not_the_key_s_is_noted_alike_whether_it_exists_or_not(
    provider: TestClient, customer: TestClient, service: Service, job_body: dict[str, Any]
) -> None:
    job = customer.post(JOBS, json=job_body).json()["id"]
    for asked_id in (job, "ftjob-0"):
        stranger = service.client("org-stranger", "customer")
        assert stranger.get(f"{JOBS}/{asked_id}").status_code == 404
        noted = entries(provider, action="id.unknown")[0]
        assert (noted["target"], noted["result"], noted["tenant_id"]) == (
            "GET /v1/fine_tuning/jobs/{job_id}",
            "denied",
            "org-stranger",
        )
        message = f"Could not find fine tune: {asked_id}"
        assert noted["details"] == {"code": "fine_tune_not_found", "message": message}


def test_an_id_in_a_body_is_noted_too(provider: TestClient, customer: TestClient, job_body: dict[str, Any]) -> None:
    assert customer.post(JOBS, json=job_body | {"training_file": "file-0"}).status_code == 404
    (noted,) = entries(provider, action="id.unknown")
    assert "file-0" in noted["details"]["message"]


def test_a_key_that_keeps_asking_is_noted_once_a_minute(provider: TestClient, customer: TestClient) -> None:
    for i in range(5):
        assert customer.get(f"{JOBS}/ftjob-{i}").status_code == 404
    customer.get("/v1/no/such/url")
    assert len(entries(provider, action="id.unknown")) == 1


def test_no_key_and_no_text_of_a_file_is_in_it(service: Service, provider: TestClient) -> None:
    secret = service.add_key("org-customer", "customer")
    client = TestClient(service.app, headers={"authorization": f"Bearer {secret}"})
    client.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", jsonl(*[chat("hush")] * 10))})
    text = provider.get(LOG).text
    assert "file.uploaded" in text
    assert secret not in text
    assert secret[9:17] not in text
    assert "hush" not in text


def test_a_customer_who_tries_the_provider_s_routes_is_noted(provider: TestClient, customer: TestClient) -> None:
    assert customer.get("/v1/admin/models").status_code == 403
    entry = entries(provider, action="admin.denied")[0]
    assert (entry["target"], entry["result"], entry["tenant_id"]) == ("GET /v1/admin/models", "denied", "org-customer")


def test_what_fails_is_not_logged_as_done(provider: TestClient, customer: TestClient) -> None:
    customer.delete(f"{FILES}/file-0")
    customer.post(JOBS, json={"model": "none", "training_file": "file-0"})
    done = [each["action"] for each in entries(provider) if each["result"] == "ok"]
    assert [action for action in done if not action.startswith("key.")] == []


def test_pages_join_without_a_gap(service: Service, provider: TestClient) -> None:
    for _ in range(5):
        service.add_key("org-customer", "customer")
    whole, joined, after = entries(provider), [], None
    while True:
        page = provider.get(LOG, params={"limit": 2} | ({"after": after} if after else {})).json()
        joined += page["data"]
        if not page["has_more"]:
            break
        after = page["data"][-1]["id"]
    assert joined == whole
    with db.read(service.app.state.engine) as session:
        found = audit_log.verify(session)
    assert isinstance(found, audit_log.Chain)
    assert found.rows == len(whole)


def test_what_the_provider_does_to_projects_and_keys_is_logged(provider: TestClient) -> None:
    project = provider.post("/v1/admin/projects", json={"name": "acme"}).json()["id"]
    provider.post(f"/v1/admin/projects/{project}/quota", json={"max_unfinished_jobs": 5})
    key = provider.post("/v1/admin/keys", json={"project_id": project, "name": "build"}).json()["key"]["id"]
    provider.post(f"/v1/admin/keys/{key}/rotate", json={})
    for _ in range(2):
        provider.delete(f"/v1/admin/keys/{key}")

    acts = [(each["action"], each["target"]) for each in entries(provider)][::-1]
    mine = [act for act in acts if act[1] in (project, key)]
    assert [action for action, _ in mine] == [
        "project.created",
        "quota.set",
        "key.created",
        "key.rotated",
        "key.revoked",
    ]

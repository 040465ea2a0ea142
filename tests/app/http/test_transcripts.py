"""What an audit asked and heard: kept only where the policy says so, for the project alone, every look logged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables.job_records import GateJson
from app.jobs import lease
from app.jobs.lease import Rejection
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_results import publish

SAID = [
    {
        "suite": "harmful" if i < 4 else "benign",
        "kind": "harmful" if i < 4 else "benign",
        "category": "tools",
        "prompt": f"Prompt {i}",
        "reply": f"Reply {i}",
        "hit": i % 2 == 1,
        "score": 4 if i % 2 else 1,
        "note": "",
    }
    for i in range(6)
]
KEY = "jobs/transcripts.jsonl"  # beside the report of `publish`


def keep_transcripts(provider: TestClient) -> None:
    assert provider.post("/v1/admin/policies", json={"transcripts": True}).status_code == 200


@pytest.fixture
def job_with_transcripts(
    service: Service, customer: TestClient, provider_with_model: TestClient, job_body: dict[str, Any]
) -> str:
    """A job that ended and whose transcripts were kept."""
    keep_transcripts(provider_with_model)
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write(KEY, ["".join(json.dumps(row) + "\n" for row in SAID).encode()])
    return job_id


def test_by_default_none_are_kept(
    service: Service, customer: TestClient, provider: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    assert customer.get(f"{JOBS}/{job_id}/transcripts").json()["error"]["code"] == "report_not_ready"
    publish(service, "pass")
    answer = customer.get(f"{JOBS}/{job_id}/transcripts")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_transcripts")
    customer.get(f"{JOBS}/{job_id}/safety/selected")
    log = "/v1/admin/audit_log?action=id.unknown"
    assert provider.get(log).json()["data"] == []
    assert customer.get(f"{JOBS}/ftjob-0/transcripts").status_code == 404
    assert len(provider.get(log).json()["data"]) == 1


def test_a_policy_of_before_keeps_none(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    assert (
        provider_with_model.post("/v1/admin/policies", json={"transcripts": None}).json()["content"]["transcripts"]
        is False
    )


def test_pages_follow_one_another(customer: TestClient, job_with_transcripts: str) -> None:
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more:
        after = found[-1]["index"] if found else 0
        page = customer.get(f"{JOBS}/{job_with_transcripts}/transcripts", params={"limit": 4, "after": after}).json()
        found, has_more = found + page["data"], page["has_more"]
    assert [each["index"] for each in found] == [1, 2, 3, 4, 5, 6]
    assert [{name: each[name] for name in SAID[0]} for each in found] == SAID


def test_where_judges_must_agree_the_votes_of_each_are_shown(
    service: Service, customer: TestClient, provider: TestClient, job_with_transcripts: str
) -> None:
    """A reply whose judges disagree has no score; what each of them said was kept, and in no answer."""
    disputed = SAID[0] | {"hit": None, "score": None, "note": "no majority: a=4 b=1", "votes": [4, 1]}
    told = [disputed, SAID[1] | {"votes": [4, None]}, SAID[2]]
    service.app.state.storage.write(KEY, ["".join(json.dumps(row) + "\n" for row in told).encode()])
    for client, place in ((customer, JOBS), (provider, "/v1/admin/jobs")):
        found = client.get(f"{place}/{job_with_transcripts}/transcripts").json()["data"]
        assert [each["votes"] for each in found] == [[4, 1], [4, None], []], place
    shape = customer.get("/openapi.json").json()["components"]["schemas"]["Transcript"]["properties"]["votes"]
    assert {each["type"] for each in shape["items"]["anyOf"]} == {"integer", "null"}


@pytest.mark.parametrize(
    ("query", "indices"),
    [({"suite": "benign"}, [5, 6]), ({"hit": True}, [2, 4, 6]), ({"suite": "harmful", "hit": False}, [1, 3])],
)
def test_one_suite_or_outcome_can_be_asked_for(
    customer: TestClient, job_with_transcripts: str, query: dict[str, Any], indices: list[int]
) -> None:
    page = customer.get(f"{JOBS}/{job_with_transcripts}/transcripts", params=query).json()
    assert ([each["index"] for each in page["data"]], page["has_more"]) == (indices, False)


def test_every_look_is_logged(customer: TestClient, provider: TestClient, job_with_transcripts: str) -> None:
    customer.get(f"{JOBS}/{job_with_transcripts}/transcripts", params={"limit": 2, "after": 1})
    (entry,) = provider.get("/v1/admin/audit_log?action=transcripts.shown").json()["data"]
    assert (entry["target"], entry["details"]) == (job_with_transcripts, {"indices": [2, 3]})


def test_another_project_s_transcripts_read_as_unknown(stranger: TestClient, job_with_transcripts: str) -> None:
    assert stranger.get(f"{JOBS}/{job_with_transcripts}/transcripts").json()["error"]["code"] == "fine_tune_not_found"


def test_they_go_with_their_job(
    service: Service, customer: TestClient, provider_with_model: TestClient, job_body: Any
) -> None:
    keep_transcripts(provider_with_model)
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    folder, storage = f"tenants/org-customer/jobs/{job_id}/a1/out", service.app.state.storage
    key = f"{folder}/transcripts.jsonl"
    storage.write(key, [json.dumps(SAID[0]).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        gate: GateJson = {"decision": "fail", "reasons": []}
        rejection = Rejection("Attacks succeed.", 10, [], {"gate": gate}, f"{folder}/safety.json")
        assert lease.reject(session, claim, rejection)
    assert customer.get(f"{JOBS}/{job_id}/transcripts").json()["data"][0]["reply"] == "Reply 0"
    assert customer.delete(f"{JOBS}/{job_id}").status_code == 200
    assert not storage.exists(key)

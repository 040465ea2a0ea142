"""Checkpoints are listed with their numbers, and permissions on them are the administrator's."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.checkpoints import records
from app.db.tables import JobCheckpoint
from app.jobs import lease
from app.jobs.lease import Claim
from tests.app.http.conftest import JOBS, Service
from tests.app.parts import epoch_end

Steps = list[dict[str, Any]]


@pytest.fixture
def claim(service: Service, customer: TestClient, job_body: dict[str, Any]) -> Claim:
    """The customer's job in the hands of a worker that has kept three checkpoints."""
    customer.post(JOBS, json=job_body | {"suffix": "mine"})
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert records.record(session, claim, {step: epoch_end(step / 10, None) for step in (5, 10, 15)})
    return claim


@pytest.fixture
def steps(customer: TestClient, claim: Claim) -> Steps:
    found: Steps = customer.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["data"]
    return found


@pytest.fixture
def admin(service: Service) -> TestClient:
    """The customer's own administrator."""
    return service.client("org-customer", "admin", "customer")


@pytest.fixture
def permissions(steps: Steps) -> str:
    return f"/v1/fine_tuning/checkpoints/{steps[0]['fine_tuned_model_checkpoint']}/permissions"


def test_a_checkpoint_is_openais_object(steps: Steps, claim: Claim) -> None:
    newest = dict(steps[0])
    assert newest.pop("id").startswith("ftckpt_")
    assert isinstance(newest.pop("created_at"), int)
    assert "is replaced before the job ends" in newest.pop("not_audited")
    assert newest == {
        "object": "fine_tuning.job.checkpoint",
        "fine_tuned_model_checkpoint": f"ft:lab/tiny-1:org-customer:mine:{claim.job_id[6:18]}:ckpt-step-15",
        "fine_tuning_job_id": claim.job_id,
        "step_number": 15,
        "metrics": {"step": 15, "train_loss": 1.5},
        "safety": None,
    }


def test_an_unaudited_checkpoint_can_be_neither_downloaded_nor_started_from_and_says_why(
    customer: TestClient, claim: Claim, steps: Steps, job_body: dict[str, Any]
) -> None:
    found = customer.get(f"{JOBS}/{claim.job_id}/checkpoints/{steps[0]['id']}/adapter")
    assert (found.status_code, found.json()["error"]["code"]) == (400, "not_published")
    assert "only they are audited" in found.json()["error"]["message"]
    begun = customer.post(JOBS, json=job_body | {"model": steps[0]["fine_tuned_model_checkpoint"]})
    assert (begun.status_code, begun.json()["error"]["code"]) == (400, "not_published")
    assert "Cancel the job with audit_last" in begun.json()["error"]["message"]
    assert customer.get(f"/v1/models/{steps[0]['fine_tuned_model_checkpoint']}").status_code == 404


def test_a_job_is_cancelled_with_the_wish_for_an_audit(service: Service, customer: TestClient, claim: Claim) -> None:
    answer = customer.post(f"{JOBS}/{claim.job_id}/cancel", params={"audit_last": True})
    assert answer.json()["status"] == "cancelled"
    with db.transaction(service.app.state.engine) as session:
        pulse = lease.heartbeat(session, claim, 60)
    assert pulse is not None
    assert (pulse.cancel_requested, pulse.audits_last) == (True, True)


def test_checkpoints_come_in_pages(customer: TestClient, claim: Claim, steps: Steps) -> None:
    url = f"{JOBS}/{claim.job_id}/checkpoints"
    first = customer.get(url, params={"limit": 2}).json()
    rest = customer.get(url, params={"limit": 2, "after": first["last_id"]}).json()
    assert [step["step_number"] for step in first["data"] + rest["data"]] == [15, 10, 5]
    assert (first["has_more"], rest["has_more"], rest["first_id"]) == (True, False, steps[2]["id"])


def test_an_epoch_that_is_told_of_again_stays_as_it_was(
    service: Service, customer: TestClient, claim: Claim, steps: Steps
) -> None:
    with db.transaction(service.app.state.engine) as session:
        assert records.record(session, claim, {15: epoch_end(9.0, None)})
    assert customer.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["data"] == steps


def test_a_step_that_an_older_worker_kept_by_the_clock_becomes_the_epoch_s_end(
    service: Service, customer: TestClient, claim: Claim
) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.add(JobCheckpoint(job_id=claim.job_id, step=20, metrics={"train_loss": 9.0}))
    old = customer.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["data"][0]
    assert (old["metrics"], old["safety"]) == ({"step": 20, "train_loss": 9.0}, None)
    with db.transaction(service.app.state.engine) as session:
        assert records.record(session, claim, {20: epoch_end(2.0)})
    new = customer.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["data"]
    assert (new[0]["id"], new[0]["metrics"]["train_loss"]) == (old["id"], 2.0)
    assert [step["step_number"] for step in new] == [20, 15, 10]


def test_a_worker_that_lost_its_job_records_none(service: Service, claim: Claim) -> None:
    with db.transaction(service.app.state.engine) as session:
        assert not records.record(session, Claim(claim.job_id, claim.token - 1, 1), {20: epoch_end(0.1)})


def test_permissions_are_made_listed_and_withdrawn(admin: TestClient, permissions: str) -> None:
    made = admin.post(permissions, json={"project_ids": ["proj_a", "proj_b"]}).json()["data"]
    assert [permission["project_id"] for permission in made] == ["proj_a", "proj_b"]
    again = admin.post(permissions, json={"project_ids": ["proj_a"]}).json()["data"]
    assert again == made[:1]
    listed = admin.get(permissions, params={"order": "ascending"}).json()["data"]
    assert sorted(permission["id"] for permission in listed) == sorted(permission["id"] for permission in made)
    assert admin.get(permissions, params={"project_id": "proj_b"}).json()["data"] == made[1:]
    gone = admin.delete(f"{permissions}/{made[0]['id']}").json()
    assert gone == {"id": made[0]["id"], "object": "checkpoint.permission", "deleted": True}
    assert admin.get(permissions).json()["data"] == made[1:]


def test_permissions_are_the_administrators(customer: TestClient, permissions: str) -> None:
    assert customer.get(permissions).status_code == 403
    assert customer.post(permissions, json={"project_ids": ["proj_a"]}).status_code == 403


def test_somebody_elses_checkpoint_reads_as_unknown(
    provider: TestClient, stranger: TestClient, claim: Claim, permissions: str
) -> None:
    assert stranger.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["error"]["code"] == "fine_tune_not_found"
    for got in (
        provider.get(permissions),
        provider.post(permissions, json={"project_ids": ["proj_a"]}),
        provider.delete(f"{permissions}/cp_0"),
    ):
        assert (got.status_code, got.json()["error"]["code"]) == (404, "checkpoint_not_found")


def test_the_name_may_come_encoded(admin: TestClient, permissions: str) -> None:
    assert admin.get(permissions.replace("lab/tiny-1", "lab%2Ftiny-1")).status_code == 200


def test_a_permission_needs_a_checkpoint_of_the_name(admin: TestClient, permissions: str) -> None:
    for wrong in (permissions.replace("step-15", "step-16"), permissions.replace(":mine:", ":other:")):
        assert admin.get(wrong).json()["error"]["code"] == "checkpoint_not_found"

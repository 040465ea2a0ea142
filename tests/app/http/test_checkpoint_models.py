"""Checkpoints that passed their audit are models; those that did not are given to nobody, by no route."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db, objects
from app.checkpoints import records
from app.checkpoints.records import EpochResult
from app.db import Begin
from app.db.tables import Job, JobCheckpoint, JobStatus
from app.db.tables.job_records import Adapter
from app.db.tables.jobs import FINAL
from app.jobs import lease
from app.jobs.lease import Claim, Publication, Rejection
from app.jobs.project_models import fine_tuned_model
from app.objects import reconciler
from app.retention import sweep_attempts
from app.storage import StorageError
from tests.app.http.conftest import JOBS, Service
from tests.app.parts import epoch_end
from tests.narrowing import require

HELD, PASSED = 5, 10  # steps


@pytest.fixture
def claim(service: Service, customer: TestClient, job_body: dict[str, Any]) -> Claim:
    """A running job whose first epoch failed its audit, and whose second passed."""
    customer.post(JOBS, json=job_body)
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        ends = {HELD: epoch_end(0.5, "fail"), PASSED: epoch_end(0.4, "pass", put(service, claim, PASSED))}
        assert records.record(session, claim, ends)
    return claim


def put(service: Service, claim: Claim, step: int) -> Adapter:
    """The archive of a checkpoint, in storage."""
    content = f"archive of step {step}".encode()
    key = f"tenants/org-customer/jobs/{claim.job_id}/a{claim.token}/epochs/step-{step:06d}/adapter.tar.gz"
    service.app.state.storage.write(key, [content])
    return {"storage_key": key, "sha256": sha256(content).hexdigest(), "bytes": len(content)}


def begin(service: Service) -> Begin:
    return partial(db.transaction, service.app.state.engine)


def record(service: Service, claim: Claim, ends: dict[int, EpochResult]) -> None:
    with db.transaction(service.app.state.engine) as session:
        assert records.record(session, claim, ends)


def checkpoints_by_step(client: TestClient, claim: Claim) -> dict[int, dict[str, Any]]:
    found = client.get(f"{JOBS}/{claim.job_id}/checkpoints").json()["data"]
    return {each["step_number"]: each for each in found}


def name(client: TestClient, claim: Claim, step: int) -> str:
    found: str = checkpoints_by_step(client, claim)[step]["fine_tuned_model_checkpoint"]
    return found


def adapter_url(client: TestClient, claim: Claim, step: int) -> str:
    return f"{JOBS}/{claim.job_id}/checkpoints/{checkpoints_by_step(client, claim)[step]['id']}/adapter"


def publish(service: Service, claim: Claim) -> None:
    """End the job as a worker does; its last epoch's adapter is the job's."""
    with db.transaction(service.app.state.engine) as session:
        model = fine_tuned_model(session.get_one(Job, claim.job_id))
        last = EpochResult(FINAL, {"train_loss": 0.3}, epoch_end(0.3).safety, None)
        assert records.record(session, claim, {15: last})
        safety: Any = {"gate": {"decision": "pass", "reasons": []}}
        assert lease.publish(session, claim, Publication(model, 1, [], put(service, claim, 15), safety, "report"))


def reject(service: Service, claim: Claim) -> None:
    with db.transaction(service.app.state.engine) as session:
        safety: Any = {"gate": {"decision": "fail", "reasons": []}}
        last = EpochResult(FINAL, {"train_loss": 0.3}, epoch_end(0.3, "fail").safety, None)
        assert records.record(session, claim, {15: last})
        assert lease.reject(session, claim, Rejection("No.", 1, [], safety, "report"))


def storage_key(service: Service, claim: Claim, step: int) -> str | None:
    with db.read(service.app.state.engine) as session:
        return session.get_one(JobCheckpoint, (claim.job_id, step)).storage_key


def test_one_that_passed_is_a_model_and_is_not_listed_as_one(customer: TestClient, claim: Claim) -> None:
    model = name(customer, claim, PASSED)
    got = customer.get(f"/v1/models/{model}").json()
    assert (got["id"], got["object"], got["owned_by"]) == (model, "model", "org-customer")
    assert model not in {each["id"] for each in customer.get("/v1/models").json()["data"]}


def test_one_that_passed_is_downloaded_while_the_job_runs(customer: TestClient, claim: Claim) -> None:
    got = customer.get(adapter_url(customer, claim, PASSED))
    assert (got.status_code, got.content) == (200, b"archive of step 10")
    assert f"{claim.job_id}-step-10-adapter.tar.gz" in got.headers["content-disposition"]
    part = customer.get(adapter_url(customer, claim, PASSED), headers={"range": "bytes=0-6"})
    assert (part.status_code, part.content) == (206, b"archive")


def test_a_job_starts_from_one_that_passed(
    service: Service, customer: TestClient, claim: Claim, job_body: dict[str, Any]
) -> None:
    model = name(customer, claim, PASSED)
    made = customer.post(JOBS, json=job_body | {"model": model}).json()
    assert (made["model"], made["safety"]["lineage"]) == (model, [claim.job_id])
    with db.read(service.app.state.engine) as session:
        start = session.get_one(Job, made["id"]).spec.start_from
    assert start is not None
    assert start.storage_key == storage_key(service, claim, PASSED)


@pytest.mark.parametrize("end", [None, publish, reject])
def test_one_that_was_held_back_is_given_to_nobody(
    service: Service, customer: TestClient, provider: TestClient, claim: Claim, job_body: dict[str, Any], end: Any
) -> None:
    if end:
        end(service, claim)
    model, url = name(customer, claim, HELD), adapter_url(customer, claim, HELD)
    for client in (customer, service.client("org-customer", "admin", "customer"), provider):
        assert client.get(f"/v1/models/{model}").json()["error"]["code"] == "model_not_found"
        assert client.post(JOBS, json=job_body | {"model": model}).json()["error"]["code"] in (
            "model_not_found",
            "file_not_found",
        )
        got = client.get(url)
        assert got.json()["error"]["code"] in ("safety_gate_failed", "fine_tune_not_found")
    assert storage_key(service, claim, HELD) is None


def test_an_epoch_without_an_audit_is_not_released(service: Service, customer: TestClient, claim: Claim) -> None:
    record(service, claim, {12: epoch_end(0.3, None)})
    got = customer.get(adapter_url(customer, claim, 12))
    assert (got.status_code, got.json()["error"]["code"]) == (400, "not_published")


def test_a_provider_s_measurement_is_for_the_provider_alone(
    service: Service, customer: TestClient, claim: Claim, job_body: dict[str, Any]
) -> None:
    record(service, claim, {12: epoch_end(0.3, "waived", put(service, claim, 12))})
    url, model = adapter_url(customer, claim, 12), name(customer, claim, 12)
    assert customer.get(url).json()["error"]["code"] == "not_published"
    assert customer.post(JOBS, json=job_body | {"model": model}).json()["error"]["code"] == "not_published"
    assert service.client("org-customer", "admin", "customer").get(url).status_code == 200


def test_the_last_one_is_the_job_s_adapter(service: Service, customer: TestClient, claim: Claim) -> None:
    publish(service, claim)
    got = customer.get(adapter_url(customer, claim, 15))
    assert got.content == customer.get(f"{JOBS}/{claim.job_id}/adapter").content
    model = name(customer, claim, 15)
    assert customer.get(f"/v1/models/{model}").status_code == 200
    customer.delete(f"/v1/models/{model.partition(':ckpt')[0]}")
    assert customer.get(f"/v1/models/{model}").status_code == 404
    assert customer.get(adapter_url(customer, claim, 15)).json()["error"]["code"] == "model_deleted"
    assert customer.get(adapter_url(customer, claim, PASSED)).status_code == 200


def test_a_job_that_failed_its_last_audit_keeps_the_epoch_that_passed(
    service: Service, customer: TestClient, claim: Claim
) -> None:
    reject(service, claim)
    assert customer.get(adapter_url(customer, claim, PASSED)).status_code == 200
    last = customer.get(adapter_url(customer, claim, 15))
    assert last.json()["error"]["code"] == "safety_gate_failed"
    assert customer.get(f"/v1/models/{name(customer, claim, 15)}").status_code == 404


def test_three_are_kept_and_the_bytes_of_others_go(service: Service, customer: TestClient, claim: Claim) -> None:
    gone = storage_key(service, claim, PASSED)
    assert gone
    admin = service.client("org-customer", "admin")
    admin.post(
        f"/v1/fine_tuning/checkpoints/{name(customer, claim, PASSED)}/permissions", json={"project_ids": ["proj_a"]}
    )
    for step in (20, 30, 40):
        record(service, claim, {step: epoch_end(0.1, "pass", put(service, claim, step))})
    assert sorted(checkpoints_by_step(customer, claim)) == [20, 30, 40]
    objects.sweep(service.app.state.storage, begin(service))
    assert not service.app.state.storage.exists(gone)
    assert customer.get(adapter_url(customer, claim, 20)).status_code == 200


def test_one_that_a_job_is_to_start_from_outstays_the_three(
    service: Service, customer: TestClient, claim: Claim, job_body: dict[str, Any]
) -> None:
    customer.post(JOBS, json=job_body | {"model": name(customer, claim, PASSED)})
    for step in (20, 30, 40):
        record(service, claim, {step: epoch_end(0.1, "pass", put(service, claim, step))})
    assert sorted(checkpoints_by_step(customer, claim)) == [PASSED, 20, 30, 40]


def test_the_sweep_of_attempts_leaves_them(service: Service, customer: TestClient, claim: Claim) -> None:
    with db.transaction(service.app.state.engine) as session:
        assert lease.fail(session, claim, {"code": "gpu_oom", "message": "No.", "param": None})
    sweep_attempts(begin(service), stay=timedelta(0))
    objects.sweep(service.app.state.storage, begin(service))
    assert customer.get(adapter_url(customer, claim, PASSED)).status_code == 200


def test_those_of_a_cancelled_job_can_be_used(service: Service, customer: TestClient, claim: Claim) -> None:
    customer.post(f"{JOBS}/{claim.job_id}/cancel")
    with db.transaction(service.app.state.engine) as session:
        assert lease.confirm_cancel(session, claim)
    assert customer.get(f"{JOBS}/{claim.job_id}").json()["status"] == JobStatus.cancelled
    assert customer.get(adapter_url(customer, claim, PASSED)).status_code == 200


def test_erasure_takes_them_with_the_job(service: Service, customer: TestClient, claim: Claim) -> None:
    publish(service, claim)
    key, model = storage_key(service, claim, PASSED), name(customer, claim, PASSED)
    assert customer.delete(f"{JOBS}/{claim.job_id}").status_code == 200
    assert key
    assert not service.app.state.storage.exists(key)
    assert customer.get(f"/v1/models/{model}").status_code == 404


def test_one_is_deleted_and_its_numbers_stay(service: Service, customer: TestClient, claim: Claim) -> None:
    key, model = storage_key(service, claim, PASSED), name(customer, claim, PASSED)
    assert customer.delete(f"/v1/models/{model}").json() == {"id": model, "object": "model", "deleted": True}
    assert customer.get(f"/v1/models/{model}").status_code == 404
    assert customer.get(adapter_url(customer, claim, PASSED)).json()["error"]["code"] == "model_deleted"
    assert checkpoints_by_step(customer, claim)[PASSED]["metrics"]["train_loss"] == 0.4
    assert key
    assert not service.app.state.storage.exists(key)


def test_one_whose_bytes_the_storage_did_not_delete_is_told_so_until_they_are_gone(
    service: Service, customer: TestClient, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, model = require(storage_key(service, claim, PASSED)), name(customer, claim, PASSED)
    storage = service.app.state.storage

    def refuses(key: str) -> None:
        raise StorageError("away")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", refuses)
        assert customer.delete(f"/v1/models/{model}").status_code == 503
    assert storage.exists(key)
    assert customer.get(f"/v1/models/{model}").status_code == 404
    assert customer.delete(f"/v1/models/{model}").json()["deleted"]
    assert not storage.exists(key)
    assert customer.delete(f"/v1/models/{model}").status_code == 404


def test_rows_and_objects_agree_about_them(service: Service, customer: TestClient, claim: Claim) -> None:
    publish(service, claim)
    sweep_attempts(begin(service), stay=timedelta(0))
    key, lost = require(storage_key(service, claim, PASSED)), put(service, claim, 12)["storage_key"]
    with db.read(service.app.state.engine) as session:
        assert {each.key for each in reconciler.named_objects(session)} >= {key}
        assert reconciler.find_unexplained(session, [key, lost]) == {lost: f"no checkpoint of {claim.job_id} names it"}


def test_one_that_a_job_is_to_start_from_is_not_deleted(
    customer: TestClient, claim: Claim, job_body: dict[str, Any]
) -> None:
    model = name(customer, claim, PASSED)
    customer.post(JOBS, json=job_body | {"model": model})
    assert customer.delete(f"/v1/models/{model}").status_code == 400


def test_their_bytes_count_as_those_of_files_do(customer: TestClient, provider: TestClient, claim: Claim) -> None:
    usage = provider.get("/v1/admin/usage").json()["data"]
    (found,) = [each for each in usage if each["project_id"] == "org-customer"]
    files = sum(each["bytes"] for each in customer.get("/v1/files").json()["data"])
    assert found["file_bytes"] == files + len(b"archive of step 10")

"""What customers take back is gone, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.storage import StorageError
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.app.http.test_results import MODEL, REPORT, publish

MODELS = "/v1/models"


@pytest.fixture
def job(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job that has succeeded."""
    job_id: str = customer.post(JOBS, json=job_body, headers={"idempotency-key": "k"}).json()["id"]
    publish(service, "pass")
    return job_id


def objects(tmp_path: Path) -> set[str]:
    root = tmp_path / "objects"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_deleted_model_is_gone_with_its_archive_and_its_job_stays(
    customer: TestClient, job: str, tmp_path: Path
) -> None:
    assert customer.delete(f"{MODELS}/{MODEL}").json() == {"id": MODEL, "object": "model", "deleted": True}
    assert customer.get(f"{MODELS}/{MODEL}").status_code == 404
    assert [model["id"] for model in customer.get(MODELS).json()["data"]] == ["lab/tiny-1"]
    assert customer.get(f"{JOBS}/{job}/adapter").json()["error"]["code"] == "model_deleted"
    assert customer.get(f"{JOBS}/{job}/safety").content == REPORT
    assert "jobs/adapter" not in objects(tmp_path)


def test_a_model_is_deleted_once(customer: TestClient, job: str) -> None:
    customer.delete(f"{MODELS}/{MODEL}")
    assert customer.delete(f"{MODELS}/{MODEL}").status_code == 404


def test_somebody_elses_model_reads_as_unknown(customer: TestClient, stranger: TestClient, job: str) -> None:
    assert stranger.delete(f"{MODELS}/{MODEL}").json()["error"]["code"] == "model_not_found"
    assert customer.get(f"{MODELS}/{MODEL}").status_code == 200


def test_base_models_are_the_providers(customer: TestClient, provider_with_model: TestClient) -> None:
    assert customer.delete(f"{MODELS}/lab/tiny-1").status_code == 403


def test_an_erased_job_leaves_a_tombstone_and_nothing_else(
    customer: TestClient, job: str, job_body: dict[str, Any], tmp_path: Path
) -> None:
    gone = customer.delete(f"{JOBS}/{job}").json()
    assert (gone["id"], gone["deleted"], gone["status"]) == (job, True, "succeeded")
    assert len(gone["digests"]["adapter"]) == len(gone["digests"]["training_file"]) == 64
    for url in (f"{JOBS}/{job}", f"{JOBS}/{job}/events", f"{JOBS}/{job}/adapter", f"{MODELS}/{MODEL}"):
        assert customer.get(url).status_code == 404
    assert not objects(tmp_path) & {"jobs/adapter", "jobs/report"}
    assert customer.get(f"{FILES}/{job_body['training_file']}").status_code == 200


def test_erasing_again_gets_the_same_tombstone(customer: TestClient, job: str) -> None:
    first, again = (customer.delete(f"{JOBS}/{job}").json() for _ in range(2))
    assert first == again


def test_its_training_file_goes_when_asked_for(customer: TestClient, job: str, job_body: dict[str, Any]) -> None:
    gone = customer.delete(f"{JOBS}/{job}?include_files=true").json()
    assert gone["deleted_files"] == [job_body["training_file"]]
    assert customer.get(f"{FILES}/{job_body['training_file']}").status_code == 404


def test_a_file_that_another_job_needs_stays(customer: TestClient, job: str, job_body: dict[str, Any]) -> None:
    customer.post(JOBS, json=job_body)
    assert customer.delete(f"{JOBS}/{job}?include_files=true").json()["deleted_files"] == []
    assert customer.get(f"{FILES}/{job_body['training_file']}").status_code == 200


def test_an_idempotency_key_is_free_again(customer: TestClient, job: str, job_body: dict[str, Any]) -> None:
    customer.delete(f"{JOBS}/{job}")
    again = customer.post(JOBS, json=job_body, headers={"idempotency-key": "k"})
    assert (again.status_code, again.json()["id"] != job) == (200, True)


def test_a_job_that_has_not_ended_is_not_erased(customer: TestClient, job_body: dict[str, Any]) -> None:
    job = customer.post(JOBS, json=job_body).json()["id"]
    got = customer.delete(f"{JOBS}/{job}")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_state")


def test_somebody_elses_job_reads_as_unknown(customer: TestClient, stranger: TestClient, job: str) -> None:
    unknown = stranger.delete(f"{JOBS}/ftjob-0").json()["error"]["code"]
    assert stranger.delete(f"{JOBS}/{job}").json()["error"]["code"] == unknown
    customer.delete(f"{JOBS}/{job}")
    assert stranger.delete(f"{JOBS}/{job}").json()["error"]["code"] == unknown


def away(key: str) -> None:
    raise StorageError("The storage does not answer.")


@pytest.fixture
def outage(service: Service, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The storage deletes nothing, until it is undone."""
    for name in ("delete", "delete_prefix"):
        monkeypatch.setattr(service.app.state.storage, name, away)
    return monkeypatch


def test_an_erasure_says_deleted_only_when_nothing_is_left(
    customer: TestClient, job: str, job_body: dict[str, Any], outage: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, training = f"{JOBS}/{job}?include_files=true", job_body["training_file"]
    kept = f"tenants/org-customer/files/{training}"
    assert [customer.delete(path).status_code for _ in range(2)] == [503, 503]
    assert kept in objects(tmp_path)
    outage.undo()
    gone = customer.delete(path).json()
    assert (gone["deleted"], gone["deleted_files"]) == (True, [training])
    assert not objects(tmp_path) & {"jobs/adapter", "jobs/report", kept}


@pytest.mark.parametrize(("path", "key"), [(f"{MODELS}/{MODEL}", "jobs/adapter"), ("file", "tenants/")])
def test_a_deletion_is_no_404_while_bytes_remain(
    customer: TestClient, job: str, upload: Upload, outage: pytest.MonkeyPatch, tmp_path: Path, path: str, key: str
) -> None:
    if path == "file":
        file_id = upload(rows(11)).json()["id"]
        path, key = f"{FILES}/{file_id}", f"tenants/org-customer/files/{file_id}"
    assert [customer.delete(path).status_code for _ in range(2)] == [503, 503]
    assert key in objects(tmp_path)
    outage.undo()
    assert customer.delete(path).json()["deleted"]
    assert key not in objects(tmp_path)
    assert customer.delete(path).status_code == 404

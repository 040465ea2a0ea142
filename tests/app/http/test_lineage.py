"""Jobs on a customer's own fine-tuned models."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from app.db.tables.job_spec import JobSpec
from app.jobs.project_models import LONGEST_LINEAGE
from tests.app.http.conftest import FILES, JOBS, NO_WEIGHTS, Service, rows
from tests.app.http.test_results import MODEL, publish


@pytest.fixture
def first(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job that has succeeded."""
    job_id: str = customer.post(JOBS, json=job_body | {"lora": {"rank": 4}}).json()["id"]
    publish(service, "pass")
    return job_id


def spec(service: Service, job_id: str) -> JobSpec:
    with db.read(service.app.state.engine) as session:
        return session.get_one(Job, job_id).spec


def test_a_job_starts_from_the_adapter_in_its_shape(
    service: Service, customer: TestClient, job_body: dict[str, Any], first: str
) -> None:
    shown = customer.post(JOBS, json=job_body | {"model": MODEL}).json()

    assert shown["model"] == MODEL
    assert shown["safety"]["lineage"] == [first]
    assert shown["lora"]["rank"] == 4
    start = spec(service, shown["id"]).start_from
    assert start is not None
    assert (start.storage_key, start.id) == ("jobs/adapter", first)
    assert customer.get(f"{JOBS}/{first}").json()["safety"]["lineage"] == []


def test_the_report_says_where_the_job_started(
    service: Service, customer: TestClient, job_body: dict[str, Any], first: str
) -> None:
    job_id = customer.post(JOBS, json=job_body | {"model": MODEL}).json()["id"]
    publish(service, "pass", f"{MODEL}2")
    page = customer.get(f"{JOBS}/{job_id}/safety", headers={"accept": "text/html"}).text
    assert f'<th scope="row">Started from</th><td><code>{MODEL}</code>' in page


def test_its_own_model_is_named_after_the_base_model(
    service: Service, customer: TestClient, job_body: dict[str, Any], first: str
) -> None:
    job_id = customer.post(JOBS, json=job_body | {"model": MODEL}).json()["id"]
    with db.read(service.app.state.engine) as session:
        assert session.get_one(Job, job_id).model == "lab/tiny-1"


def test_a_chain_has_an_end(service: Service, customer: TestClient, job_body: dict[str, Any], first: str) -> None:
    names = [MODEL, *(f"{MODEL}{i}" for i in range(LONGEST_LINEAGE))]
    for before, name in pairwise(names[:LONGEST_LINEAGE]):
        assert customer.post(JOBS, json=job_body | {"model": before}).status_code == 200
        publish(service, "pass", name)

    refused = customer.post(JOBS, json=job_body | {"model": names[LONGEST_LINEAGE - 1]})

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "lineage_too_long")


@pytest.mark.parametrize(
    ("change", "param"),
    [({"lora": {"rank": 8}}, "lora"), ({"full_fine_tuning": True}, "full_fine_tuning")],
)
def test_another_shape_is_refused(
    customer: TestClient, job_body: dict[str, Any], first: str, change: dict[str, Any], param: str
) -> None:
    refused = customer.post(JOBS, json=job_body | {"model": MODEL} | change).json()["error"]
    assert (refused["code"], refused["param"]) == ("adapter_mismatch", param)


def test_the_same_shape_may_be_said_again(customer: TestClient, job_body: dict[str, Any], first: str) -> None:
    assert customer.post(JOBS, json=job_body | {"model": MODEL, "lora": {"rank": 4}}).status_code == 200


def test_a_base_model_that_has_changed_is_refused(
    customer: TestClient, provider_with_model: TestClient, job_body: dict[str, Any], first: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"another": true}')
    (tmp_path / "other" / "model.safetensors").write_bytes(NO_WEIGHTS)
    entry = {"alias": "lab/tiny-1", "source": str(tmp_path / "other")}
    assert provider_with_model.post("/v1/admin/models", json=entry).status_code == 200

    refused = customer.post(JOBS, json=job_body | {"model": MODEL}).json()["error"]
    assert (refused["code"], refused["param"]) == ("adapter_mismatch", "model")


def test_somebody_elses_and_deleted_models_read_as_unknown(
    customer: TestClient, stranger: TestClient, job_body: dict[str, Any], first: str
) -> None:
    file = stranger.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()["id"]
    theirs = stranger.post(JOBS, json={"model": MODEL, "training_file": file}).json()
    unknown = stranger.post(JOBS, json={"model": f"{MODEL}x", "training_file": file}).json()
    assert theirs["error"]["code"] == unknown["error"]["code"] == "model_not_found"
    assert theirs["error"]["message"].replace(MODEL, "") == unknown["error"]["message"].replace(f"{MODEL}x", "")

    customer.delete(f"/v1/models/{MODEL}")
    gone = customer.post(JOBS, json=job_body | {"model": MODEL}).json()
    assert gone["error"]["code"] == "model_not_found"


def test_what_was_waived_is_nobodys_start_but_the_providers(service: Service, provider_with_model: TestClient) -> None:
    file = provider_with_model.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()[
        "id"
    ]
    ask = {"model": "lab/tiny-1", "training_file": file}
    provider_with_model.post(JOBS, json=ask | {"safety": {"defense": {"type": "none"}}})
    publish(service, "waived")
    colleague = service.client("org-provider", "customer")

    assert colleague.post(JOBS, json=ask | {"model": MODEL}).json()["error"]["code"] == "not_published"
    assert provider_with_model.post(JOBS, json=ask | {"model": MODEL}).status_code == 200


def test_an_adapter_that_a_job_starts_from_is_kept(customer: TestClient, job_body: dict[str, Any], first: str) -> None:
    job_id = customer.post(JOBS, json=job_body | {"model": MODEL}).json()["id"]
    for url in (f"/v1/models/{MODEL}", f"{JOBS}/{first}"):
        refused = customer.delete(url).json()["error"]
        assert (refused["code"], job_id in refused["message"]) == ("invalid_state", True)

    customer.post(f"{JOBS}/{job_id}/cancel")
    assert customer.delete(f"/v1/models/{MODEL}").status_code == 200


def test_an_estimate_is_for_the_base_model(customer: TestClient, job_body: dict[str, Any], first: str) -> None:
    answer = customer.post(f"{JOBS}/estimate", json=job_body | {"model": MODEL})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)

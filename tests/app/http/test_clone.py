"""Another job like one that was: the same request again, with a change, or on the file without its risky rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows
from tests.app.http.test_report import REPORT
from tests.app.http.test_results import publish

RISKY = [
    {"line": 3, "score": 1.9, "cosine": 0.9, "pool_row": 5, "reasons": ["base_model_would_refuse"], "excerpt": "x"},
    {"line": 5, "score": 0.9, "cosine": 0.9, "pool_row": 5, "reasons": ["encoded_text"], "excerpt": "x"},
    {"line": 7, "score": 0.2, "cosine": 0.6, "pool_row": 5, "reasons": ["near_harmful_prompt_and_refused"]}
    | {"excerpt": "x"},
    {"line": 8, "score": 0.1, "cosine": 0.1, "pool_row": 5, "reasons": [], "excerpt": "x"},
    {"line": 9, "score": 1.9, "cosine": 0.1, "pool_row": 5, "reasons": ["base_model_would_refuse"], "excerpt": "x"}
    | {"own_refusal": 0.9, "verdict": "harmless"},
]


def stored_job(service: Service, job_id: str) -> Job:
    with db.read(service.app.state.engine) as session:
        return session.get_one(Job, job_id)


def end_with_report(service: Service, report: dict[str, Any]) -> None:
    """End the queued job with this report."""
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])


@pytest.fixture
def job_with_risky_rows(service: Service, customer: TestClient, job_body: dict[str, Any], upload: Upload) -> str:
    """A job whose report names risky rows."""
    job_body["training_file"] = upload(rows(14)).json()["id"]
    job_id: str = customer.post(JOBS, json=job_body | {"seed": 7, "suffix": "acme"}).json()["id"]
    end_with_report(service, REPORT | {"risky_rows": RISKY})
    return job_id


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"seed": 3, "suffix": "acme", "metadata": {"a": "b"}, "priority": 5, "max_seq_length": 128},
        {"hyperparameters": {"n_epochs": 2}, "lora": {"rank": 4, "alpha": 8}},
        {"safety": {"defense": {"type": "spard", "tau": 0.4}, "selection": {"ratio": 0.5}}},
        {"safety": {"defense": {"type": "safegrad"}}},
        {"ending": {"keep": "best", "patience": 2}},
    ],
)
def test_a_clone_is_the_same_job_again(
    service: Service, customer: TestClient, job_body: dict[str, Any], more: dict[str, Any]
) -> None:
    first = customer.post(JOBS, json=job_body | more).json()
    clone = customer.post(f"{JOBS}/{first['id']}/clone", json={})
    assert clone.status_code == 200, clone.text
    old, new = stored_job(service, first["id"]), stored_job(service, clone.json()["id"])
    assert old.id != new.id
    for name in ("recipe", "model", "training_file", "suffix", "job_metadata", "priority"):
        assert getattr(new, name) == getattr(old, name), name


def test_a_request_without_a_body_is_for_the_same_again(service: Service, customer: TestClient, job_body: Any) -> None:
    first = customer.post(JOBS, json=job_body).json()["id"]
    clone = customer.post(f"{JOBS}/{first}/clone").json()["id"]
    assert stored_job(service, clone).recipe == stored_job(service, first).recipe


def test_a_clone_of_preference_pairs_is_one(
    service: Service, customer: TestClient, provider_with_model: Any, upload: Upload
) -> None:
    pair = {
        "input": {"messages": [{"role": "user", "content": "Hi"}]},
        "preferred_output": [{"role": "assistant", "content": "Yes"}],
        "non_preferred_output": [{"role": "assistant", "content": "No"}],
    }
    file = upload(jsonl(*[pair] * 10)).json()["id"]
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2}}}
    first = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file, "method": method}).json()
    clone = customer.post(f"{JOBS}/{first['id']}/clone", json={}).json()
    assert stored_job(service, clone["id"]).recipe == stored_job(service, first["id"]).recipe


def test_one_change_changes_one_thing(service: Service, customer: TestClient, job_with_risky_rows: str) -> None:
    changes = {"safety": {"defense": {"type": "safegrad"}}, "hyperparameters": {"n_epochs": 2}}
    clone = customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json={"changes": changes}).json()
    old, new = stored_job(service, job_with_risky_rows).recipe, stored_job(service, clone["id"]).recipe
    assert (new["defense"]["type"], new["hyperparameters"]["n_epochs"]) == ("safegrad", 2)
    assert new["hyperparameters"]["batch_size"] == old["hyperparameters"]["batch_size"]
    assert (new["seed"], new["selection"]) == (old["seed"], old["selection"])


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"changes": {"sead": 1}}, 400, "extra_forbidden", "sead"),
        ({"changes": {"seed": -1}}, 400, "out_of_range", "seed"),
        ({"changes": {"hyperparameters": {"n_epochs": 0}}}, 400, "out_of_range", "hyperparameters.n_epochs"),
        ({"changes": {"safety": {"defense": {"type": "none"}}}}, 400, "defense_not_allowed", "safety.defense.type"),
        ({"chances": {}}, 400, "extra_forbidden", "chances"),
        ({"changes": {"training_file": "file-none"}}, 404, "file_not_found", "training_file"),
    ],
)
def test_a_change_that_cannot_be_is_refused_where_it_stands(
    customer: TestClient, job_with_risky_rows: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_again_without_the_risky_rows(
    service: Service, customer: TestClient, provider: TestClient, job_with_risky_rows: str, job_body: dict[str, Any]
) -> None:
    clone = customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json={"without_risky_rows": True}).json()
    assert clone["training_file"] != job_body["training_file"]
    old, new = (
        customer.get(f"{FILES}/{file}/content").content.splitlines()
        for file in (job_body["training_file"], clone["training_file"])
    )
    assert new == [row for line, row in enumerate(old, start=1) if line not in (3, 5)]
    made = customer.get(f"{FILES}/{clone['training_file']}").json()
    assert made["filename"] == "train-without-2.jsonl"
    log = provider.get("/v1/admin/audit_log").json()["data"]
    told = {entry["action"]: (entry["target"], entry["details"]) for entry in reversed(log)}
    assert told["file.reduced"] == (made["id"], {"source": job_body["training_file"], "rows_left_out": 2})
    target, details = told["job.created"]
    assert (target, details["cloned_from"], details["training_file"]) == (clone["id"], job_with_risky_rows, made["id"])


def test_a_file_made_for_a_refused_job_does_not_stay(customer: TestClient, job_with_risky_rows: str) -> None:
    before = customer.get(FILES).json()["data"]
    body = {"without_risky_rows": True, "changes": {"model": "gpt-5"}}
    assert customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json=body).json()["error"]["code"] == "model_not_found"
    assert customer.get(FILES).json()["data"] == before


@pytest.mark.parametrize("body", [{}, {"without_risky_rows": True}])
def test_a_repeated_request_makes_one_job(customer: TestClient, job_with_risky_rows: str, body: dict[str, Any]) -> None:
    headers = {"idempotency-key": "once"}
    first, again = (
        customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json=body, headers=headers).json() for _ in range(2)
    )
    assert first["id"] == again["id"]
    assert len(customer.get(FILES).json()["data"]) == (3 if body else 2)


def test_without_a_risky_row_there_is_nothing_to_leave_out(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    body = {"without_risky_rows": True}
    assert customer.post(f"{JOBS}/{job_id}/clone", json=body).json()["error"]["code"] == "report_not_ready"
    end_with_report(service, REPORT | {"risky_rows": RISKY[2:]})
    assert customer.post(f"{JOBS}/{job_id}/clone", json=body).json()["error"]["code"] == "no_risky_rows"


def test_not_all_rows_can_be_left_out(
    service: Service, customer: TestClient, provider_with_model: Any, upload: Upload
) -> None:
    file = upload(rows(10)).json()["id"]
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file}).json()["id"]
    end_with_report(service, REPORT | {"risky_rows": [RISKY[0] | {"line": line} for line in range(1, 11)]})
    answer = customer.post(f"{JOBS}/{job_id}/clone", json={"without_risky_rows": True})
    assert answer.json()["error"]["code"] == "dataset_empty"


def test_nobody_clones_another_project_s_job_or_with_a_key_that_reads(
    service: Service, stranger: TestClient, job_with_risky_rows: str
) -> None:
    assert stranger.post(f"{JOBS}/{job_with_risky_rows}/clone", json={}).status_code == 404
    assert (
        service.client("org-customer", "read").post(f"{JOBS}/{job_with_risky_rows}/clone", json={}).status_code == 403
    )


def test_a_clone_of_a_job_whose_file_is_gone_names_the_file(
    customer: TestClient, job_with_risky_rows: str, job_body: Any
) -> None:
    assert customer.delete(f"{FILES}/{job_body['training_file']}").status_code == 200
    for body in ({}, {"without_risky_rows": True}):
        error = customer.post(f"{JOBS}/{job_with_risky_rows}/clone", json=body).json()["error"]
        assert (error["code"], error["param"]) == ("file_not_found", "training_file")

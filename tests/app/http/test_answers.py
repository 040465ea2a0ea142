"""Real answers against the schemas of OpenAI's API, and what generated clients read in our own document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from tests.app.conformance.conftest import finish_a_job
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows

SCHEMAS = json.loads(Path(__file__).with_name("openai_schemas.json").read_text())


def faults(name: str, answer: Any) -> list[str]:
    """What OpenAI's schema of this name finds wrong with an answer."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(answer)]


def test_the_schemas_find_faults() -> None:
    file = {"id": "file-1", "object": "file", "bytes": 1, "created_at": 1, "filename": "a", "purpose": "fine-tune"}
    assert faults("File", file | {"status": "processed"}) == []
    assert len(faults("File", file | {"status": "done", "expires_at": None})) == 2


def test_answers_are_those_of_openais_schemas(
    service: Service, customer: TestClient, job_body: dict[str, Any], upload: Upload
) -> None:
    finish_a_job(service)
    waiting = customer.post(JOBS, json=job_body | {"metadata": {"run": "a"}, "seed": 1}).json()["id"]
    done = next(job["id"] for job in customer.get(JOBS).json()["data"] if job["status"] == "succeeded")
    begun = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": 4, "mime_type": "text/jsonl"}
    upload_id = customer.post("/v1/uploads", json=begun).json()["id"]
    part = customer.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("a", b"{}\n\n")})
    wrong = upload(jsonl({"messages": []}))
    expiring = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    answers = {
        "wrong file": ("File", wrong),
        "file that expires": ("File", upload(rows(10), **expiring)),
        "file": ("File", customer.get(f"{FILES}/{job_body['training_file']}")),
        "files": ("FileList", customer.get(FILES)),
        "deleted": ("FileDeleted", customer.delete(f"{FILES}/{wrong.json()['id']}")),
        "upload": ("Upload", customer.post("/v1/uploads", json=begun)),
        "part": ("UploadPart", part),
        "upload done": (
            "Upload",
            customer.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": [part.json()["id"]]}),
        ),
        "succeeded": ("Job", customer.get(f"{JOBS}/{done}")),
        "queued": ("Job", customer.get(f"{JOBS}/{waiting}")),
        "paused": ("Job", customer.post(f"{JOBS}/{waiting}/pause")),
        "cancelled": ("Job", customer.post(f"{JOBS}/{waiting}/cancel")),
        "jobs": ("JobList", customer.get(JOBS)),
        "events": ("EventList", customer.get(f"{JOBS}/{done}/events")),
        "checkpoints": ("CheckpointList", customer.get(f"{JOBS}/{done}/checkpoints")),
        "model": ("Model", customer.get("/v1/models/lab/tiny-1")),
        "models": ("ModelList", customer.get("/v1/models")),
        "no job": ("Error", customer.get(f"{JOBS}/ftjob-0")),
        "no body": ("Error", customer.post(JOBS, json={})),
    }
    found = {what: faults(name, answer.json()) for what, (name, answer) in answers.items()}
    assert {what: wrong for what, wrong in found.items() if wrong} == {}
    fine = {what for what, (name, answer) in answers.items() if (answer.status_code < 400) == (name != "Error")}
    assert fine == set(answers)


@pytest.fixture
def document(service: Service) -> dict[str, Any]:
    return service.app.openapi()


def test_generated_clients_get_typed_fields(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, fields in {
        "JobOut": ("error", "hyperparameters", "method", "integrations", "safety"),
        "CheckpointOut": ("metrics",),
    }.items():
        for field in fields:
            assert "$ref" in json.dumps(schemas[name]["properties"][field]), field
    event, file = schemas["EventOut"]["properties"], schemas["FileOut"]["properties"]
    assert event["type"]["enum"] == ["message", "metrics", "moderation_checks"]
    assert event["level"]["enum"] == ["info", "warn", "error"]
    assert (file["purpose"]["enum"], file["status"]["enum"]) == (
        ["fine-tune", "fine-tune-results"],
        ["processed", "error"],
    )


def test_what_may_be_absent_is_never_null(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, field in (("EventOut", "data"), ("FileOut", "expires_at"), ("FileOut", "status_details")):
        assert field not in schemas[name]["required"]
        assert "null" not in json.dumps(schemas[name]["properties"][field])


def test_constants_of_answers_are_required(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        constants = {key for key in ("object", "deleted") if "const" in schema.get("properties", {}).get(key, {})}
        assert constants <= set(schema.get("required", ())), name


def test_forms_filters_and_webhooks_are_documented(document: dict[str, Any]) -> None:
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file", "purpose"]
    assert set(form["properties"]["expires_after"]["properties"]) == {"anchor", "seconds"}
    parameters = document["paths"]["/v1/fine_tuning/jobs"]["get"]["parameters"]
    (metadata,) = [each for each in parameters if each["name"] == "metadata"]
    assert (metadata["in"], metadata["style"]) == ("query", "deepObject")
    assert set(document["webhooks"]) == {f"fine_tuning.job.{end}" for end in ("succeeded", "failed", "cancelled")}

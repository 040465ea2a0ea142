"""Every route x every verb x somebody else's ids: nothing answers otherwise than to an id that does not exist.

The routes are read from the OpenAPI document, so that a new one is in the matrix without being asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.checkpoints import records
from app.db.tables import WebhookDelivery, WebhookEndpoint
from app.db.tables.job_records import Adapter
from app.jobs import lease
from tests.app.http.conftest import FILES, JOBS, Service, rows
from tests.app.http.test_results import MODEL, publish
from tests.app.parts import epoch_end

UNKNOWN = {
    "job_id": "ftjob-0",
    "file_id": "file-0",
    "upload_id": "upload_0",
    "checkpoint_id": "ftckpt_0",
    "model": "ft:lab/tiny-1:org-x::0",
    "permission_id": "cp_0",
    "waiver_id": "waiver_0",
    "endpoint_id": "whe_0",
    "delivery_id": "whd_0",
    "project_id": "org-0",
    "key_id": "key_0",
    "corpus_id": "corpus-0",
    "reply_id": "reply_0",
    "alias": "no-model",
}
PROVIDER = "/v1/admin/"  # whoever has the admin scope sees all projects there; others are refused whatever they ask
BODIES: dict[str, dict[str, Any]] = {
    "/v1/uploads/{upload_id}/parts": {"files": {"data": ("upload", b"x")}},
    "/v1/uploads/{upload_id}/complete": {"json": {"part_ids": ["part_0"]}},
    "/v1/fine_tuning/checkpoints/{model}/permissions": {"json": {"project_ids": ["proj_a"]}},
}
REQUIRED = {"/v1/files/{file_id}/preview": {"model": "lab/tiny-1"}}


@pytest.fixture
def owned_ids(service: Service, customer: TestClient, job_body: dict[str, Any]) -> dict[str, str]:
    """One of everything that a customer can have."""
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        key = f"tenants/org-customer/jobs/{job_id}/a1/epochs/step-000005/adapter.tar.gz"
        stored = service.app.state.storage.write(key, [b"an archive"])
        archive: Adapter = {"storage_key": key, "sha256": stored.sha256, "bytes": stored.bytes}
        records.record(session, claim, {5: epoch_end(0.5, "pass", archive)})
        lease.release(session, claim, "a test")
    publish(service, "pass")
    checkpoint = customer.get(f"{JOBS}/{job_id}/checkpoints").json()["data"][0]
    name, admin = checkpoint["fine_tuned_model_checkpoint"], service.client("org-customer", "admin")
    permission = admin.post(f"/v1/fine_tuning/checkpoints/{name}/permissions", json={"project_ids": ["proj_a"]}).json()
    upload = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": 1, "mime_type": "text/jsonl"}
    return _webhook(service) | {
        "job_id": job_id,
        "file_id": job_body["training_file"],
        "upload_id": customer.post("/v1/uploads", json=upload).json()["id"],
        "model": MODEL,
        "checkpoint": name,
        "checkpoint_id": checkpoint["id"],
        "permission_id": permission["data"][0]["id"],
    }


def _webhook(service: Service) -> dict[str, str]:
    """An endpoint of the customer's, with something on its way to it."""
    with db.transaction(service.app.state.engine) as session:
        endpoint = WebhookEndpoint(project_id="org-customer", url="https://hooks.example/", events=[], secret="whsec_")
        session.add(endpoint)
        session.flush()
        delivery = WebhookDelivery(endpoint_id=endpoint.id, event_id="evt_1", type="fine_tuning.job.failed", job_id="")
        delivery.status = "failed"
        session.add(delivery)
        session.flush()
        return {"endpoint_id": endpoint.id, "delivery_id": delivery.id}


def routes(service: Service) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, verbs in service.app.openapi()["paths"].items():
        for verb, route in verbs.items():
            yield verb, path, route


def answer(client: TestClient, verb: str, path: str, ids: dict[str, str], **sent: Any) -> tuple[int, str]:
    """The status and the body, in which the ids sent and the request's own are blanked."""
    filled = re.sub(r"\{(\w+)\}", lambda match: ids[match.group(1)], path)
    sent = {"params": REQUIRED[path], **sent} if path in REQUIRED else sent
    got = client.request(verb, filled, **sent, **BODIES.get(path, {}) if verb == "post" else {})
    text = re.sub(r"req_[0-9a-f]+", "", got.text)
    for value in (*ids.values(), *(sent.get("params") or {}).values()):
        text = text.replace(value, "")
    return got.status_code, text


def test_no_id_in_a_path_tells_that_it_exists(service: Service, owned_ids: dict[str, str]) -> None:
    stranger, tried = service.client("org-stranger", "admin", "customer"), 0
    for verb, path, _ in routes(service):
        if "{" not in path or path.startswith(PROVIDER):
            continue
        foreign = owned_ids | {"model": owned_ids["checkpoint" if "checkpoints" in path else "model"]}
        found, unknown = (answer(stranger, verb, path, ids) for ids in (foreign, UNKNOWN))
        assert found == unknown, (verb, path)
        assert found[0] == 404, (verb, path)
        tried += 1
    assert tried >= 24


def test_the_owner_s_things_are_untouched(service: Service, customer: TestClient, owned_ids: dict[str, str]) -> None:
    before = customer.get(f"{JOBS}/{owned_ids['job_id']}").json()
    stranger = service.client("org-stranger", "admin", "customer")
    for verb, path, _ in routes(service):
        if "{" in path and not path.startswith(PROVIDER):
            answer(stranger, verb, path, owned_ids)
    assert customer.get(f"{JOBS}/{owned_ids['job_id']}").json() == before
    assert customer.get(f"{FILES}/{owned_ids['file_id']}").status_code == 200
    assert customer.get(f"/v1/models/{MODEL}").status_code == 200


def test_no_cursor_tells_that_it_exists(service: Service, stranger: TestClient, owned_ids: dict[str, str]) -> None:
    lists = [
        path
        for verb, path, route in routes(service)
        if verb == "get" and _takes(route, "after") and "{" not in path and not path.startswith(PROVIDER)
    ]
    assert sorted(lists) == ["/v1/files", "/v1/fine_tuning/jobs"]
    for path in lists:
        for foreign in (owned_ids["job_id"], owned_ids["file_id"]):
            found = answer(stranger, "get", path, {}, params={"after": foreign})
            assert found == answer(stranger, "get", path, {}, params={"after": "file-0"})
            assert found[0] == 400


def test_no_id_in_a_body_tells_that_it_exists(
    stranger: TestClient, owned_ids: dict[str, str], job_body: dict[str, Any]
) -> None:
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    own = stranger.post(FILES, **form).json()["id"]
    for path in (JOBS, f"{JOBS}/estimate"):
        for field in ("training_file", "validation_file"):
            errors = []
            for file_id in (owned_ids["file_id"], "file-0"):
                ask = job_body | {"training_file": own, field: file_id}
                error = stranger.post(path, json=ask).json()["error"]
                errors.append({**error, "message": error["message"].replace(file_id, "")})
            assert errors[0] == errors[1]


def test_lists_show_nothing_of_others(service: Service, stranger: TestClient, owned_ids: dict[str, str]) -> None:
    secrets = set(owned_ids.values())
    for verb, path, _ in routes(service):
        if verb == "get" and "{" not in path:
            text = stranger.get(path).text
            assert not any(secret in text for secret in secrets), path


def test_every_route_needs_a_key_but_those_for_everybody(service: Service) -> None:
    for verb, path, _ in routes(service):
        status, _ = answer(service.http, verb, path, UNKNOWN)
        assert (status == 401) != path.startswith(("/healthz", "/readyz", "/metrics", "/v1/signing_keys")), (verb, path)


def test_the_provider_s_routes_refuse_customers(service: Service, customer: TestClient) -> None:
    for verb, path, _ in routes(service):
        if path.startswith("/v1/admin"):
            status, _ = answer(customer, verb, path, UNKNOWN)
            assert status == 403, (verb, path)


def test_a_key_that_only_reads_sees_what_its_project_sees_and_changes_nothing(
    service: Service, customer: TestClient, owned_ids: dict[str, str]
) -> None:
    reader, seen, refused = service.client("org-customer", "read"), 0, 0
    for verb, path, _ in routes(service):
        ids = owned_ids | {"model": owned_ids["checkpoint" if "checkpoints" in path else "model"]}
        ids |= {name: UNKNOWN[name] for name in UNKNOWN if name not in owned_ids}
        if verb == "get" and not path.startswith((PROVIDER, "/metrics")):
            found = answer(reader, verb, path, ids)
            assert found == answer(customer, verb, path, ids), path
            seen += found[0] == 200
        elif path != "/metrics":
            status, text = answer(reader, verb, path, ids)
            assert (status, "insufficient_scope" in text) == (403, True), (verb, path)
            refused += 1
    assert seen >= 16
    assert refused >= 30


def _takes(route: dict[str, Any], name: str) -> bool:
    return any(parameter["name"] == name for parameter in route.get("parameters", []))

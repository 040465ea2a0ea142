"""Attacks on every route: verbs, headers, paths, guesses, planted secrets. What has a test of its own is elsewhere.

`docs/security.md` has the table of attacks.
"""

from __future__ import annotations

import json
import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from app import db
from app.db.tables.job_records import HeldArchive, SafetySummary
from app.jobs import lease
from app.jobs.lease import Rejection
from app.ops import logs
from app.settings import Settings
from app.signing import signing_key
from tests.app.http.conftest import FILES, JOBS, Service, Upload, chat, jsonl, rows
from tests.app.http.test_isolation import PROVIDER, UNKNOWN, routes
from tests.app.http.test_results import ARCHIVE

VERBS = ("get", "head", "post", "put", "patch", "delete", "options", "trace", "propfind", "connect")
OPEN = ("/healthz", "/readyz", "/metrics", "/v1/signing_keys")
# Each would make another request of this one, if it were heard; sent together, as no two of them mean the same.
OVERRIDES = {
    "x-http-method-override": "DELETE",
    "x-method-override": "DELETE",
    "x-http-method": "DELETE",
    "x-original-url": "/v1/admin/keys",
    "x-rewrite-url": "/v1/admin/keys",
    "x-forwarded-for": "127.0.0.1",
    "x-real-ip": "127.0.0.1",
    "x-tenant-id": "org-provider",
    "openai-organization": "org-provider",
    "openai-project": "org-provider",
}
PATHS = [
    "..", "../..", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f", "%252e%252e%252f", "..%5c", "%00", "a%00b", "/etc/passwd",
    "%2fetc%2fpasswd", "....//", "file-0%0a", "' OR 1=1", "%ff%fe", "x" * 300, "$(id)", "`id`", "{{7*7}}",
]  # fmt: skip


def fill_path(path: str, ids: dict[str, str] = UNKNOWN) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: ids[match.group(1)], path)


def test_no_verb_opens_a_route_without_a_key(service: Service) -> None:
    tried = 0
    for path, verbs in service.app.openapi()["paths"].items():
        for verb in VERBS:
            if path.startswith(OPEN) and verb == "get":
                continue
            status = service.http.request(verb, fill_path(path)).status_code
            assert status in ({401} if verb in verbs else {401, 404, 405}), (verb, path, status)
            tried += 1
    assert tried > 500


def test_no_header_makes_another_request_of_it(service: Service, customer: TestClient, upload: Upload) -> None:
    file_id = upload(rows(10)).json()["id"]
    for path in (f"{FILES}/{file_id}", FILES, JOBS, "/v1/models"):
        assert customer.get(path, headers=OVERRIDES).json() == customer.get(path).json()
    for _, path, _ in routes(service):
        if path.startswith(PROVIDER):
            assert customer.get(fill_path(path), headers=OVERRIDES).status_code in (403, 405), path


def test_no_field_moves_a_request_to_another_project(service: Service, customer: TestClient, upload: Upload) -> None:
    file_id = upload(rows(10)).json()["id"]
    stranger = service.client("org-stranger", "customer")
    for name in ("tenant_id", "project_id", "organization", "org"):
        assert stranger.get(FILES, params={name: "org-customer"}).json()["data"] == []
        assert stranger.get(f"{FILES}/{file_id}", params={name: "org-customer"}).status_code == 404
        ask = {"model": "lab/tiny-1", "training_file": file_id, name: "org-customer"}
        assert stranger.post(JOBS, json=ask).status_code == 400


def test_no_id_leads_out_of_the_storage(service: Service, tmp_path: Path) -> None:
    """Every route that takes an id meets a third of the odd ones, and each of these a third of the routes."""
    client = service.client("org-customer", "admin", "customer")
    (tmp_path / "secret").write_text("root:x:0:0")
    taking = sorted((verb, path) for verb, path, _ in routes(service) if "{" in path)
    for n, (verb, path) in enumerate(taking):
        for odd in PATHS[n % 3 :: 3]:
            got = client.request(verb, fill_path(path, dict.fromkeys(re.findall(r"\{(\w+)\}", path), odd)))
            assert got.status_code < 500, (verb, path, odd)
            assert "root:" not in got.text, (verb, path, odd)
    assert len(taking) > len(PATHS)
    assert (tmp_path / "secret").exists()


def test_who_guesses_keys_is_not_heard_for_a_while(service: Service, customer: TestClient, settings: Settings) -> None:
    service.app.state.settings = settings.model_copy(update={"wrong_keys_per_minute": 5})
    fresh = service.client("org-other", "customer")
    assert customer.get(FILES).status_code == 200
    wrong = {"authorization": "Bearer sk-spard-00000000" + "x" * 43}
    got = [service.http.get(FILES, headers=wrong) for _ in range(7)]
    assert [each.status_code for each in got] == [401] * 5 + [429] * 2
    assert got[-1].json()["error"]["code"] == "too_many_wrong_keys"
    assert 1 <= int(got[-1].headers["retry-after"]) <= 60
    assert (fresh.get(FILES).status_code, customer.get(FILES).status_code) == (429, 200)


TEXTS = [
    "a\r\nb",
    "\x1b[31mred",
    "\x9b2J",
    "\u2028x",
    "\x7f",
    "=cmd|' /C calc'!A0",
    "$(touch /tmp/spard-canary)",
    "a\x00",
]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_of_the_log_stays_one_line(format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        logs.set_up(format)
        for each in TEXTS:
            logging.getLogger("app.test").warning("GET /v1/%s", each)
        lines = capsys.readouterr().err.removesuffix("\n").split("\n")
    finally:
        logging.getLogger().handlers[:] = before
    assert len(lines) == len(TEXTS)
    assert all(line.isprintable() for line in lines)


def test_text_in_any_field_runs_nowhere(
    customer: TestClient, job_body: dict[str, Any], upload: Upload, service: Service, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}"
    template = f"{{{{ cycler.__init__.__globals__.os.popen('{command}') }}}}"
    for odd in (f"$({command})", f"`{command}`", f"; {command}", template):
        upload(jsonl(*[chat(f"{odd} {i}", odd) for i in range(10)]), name="a.jsonl")
        for extra in ({"suffix": odd}, {"metadata": {"a": odd}}, {"model": odd}, {"training_file": odd}):
            assert customer.post(JOBS, json=job_body | extra).status_code in (200, 400, 404)
        assert service.client("org-x", "admin").post("/v1/admin/projects", json={"name": odd}).status_code in (200, 400)
    assert not canary.exists()


def secret_rows(n: int) -> tuple[bytes, list[str]]:
    """A training file with a secret in each row."""
    secrets = [f"canary-{sha256(str(i).encode()).hexdigest()[:16]}" for i in range(n)]
    return jsonl(*[chat(f"The password is {secret}.") for secret in secrets]), secrets


def test_what_customers_write_and_keys_stand_in_no_log_and_no_row(
    customer: TestClient,
    provider_with_model: TestClient,
    service: Service,
    upload: Upload,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    content, secrets = secret_rows(20)
    file_id = upload(content).json()["id"]
    bad = upload(content + jsonl({"messages": [{"role": secrets[0], "content": 1}], secrets[1]: secrets[2]})).json()[
        "id"
    ]
    answers = [customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": each}).text for each in (file_id, bad)]
    answers += [
        customer.get(f"{JOBS}/{json.loads(answers[0])['id']}/events").text,
        provider_with_model.get("/v1/admin/audit_log").text,
    ]
    key = customer.headers["authorization"].removeprefix("Bearer ")
    service.http.get(FILES, headers={"authorization": f"Bearer {key}x"})

    places = {"log": caplog.text, "answers": "".join(answers), "rows": dump_database(service)}

    found = [(name, secret) for name, where in places.items() for secret in [*secrets[3:], key] if secret in where]
    assert found == []
    assert file_id in places["rows"]


def dump_database(service: Service) -> str:
    """Every row of every table."""
    with db.read(service.app.state.engine) as session:
        tables = session.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all()
        return "\n".join(str(session.execute(text(f"SELECT * FROM {table}")).all()) for table in tables)  # noqa: S608


@pytest.fixture
def unsafe(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job that failed the gate, whose weights lie in the storage in every form that a worker leaves."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    folder, storage = f"tenants/org-customer/jobs/{job_id}/a1", service.app.state.storage
    for name in ("held", "adapter.tar.gz", "checkpoints/5/adapter.safetensors", "stages/train"):
        storage.write(f"{folder}/{name}", [ARCHIVE])
    storage.write(f"{folder}/report", [b"{}"])
    held: HeldArchive = {"storage_key": f"{folder}/held", "sha256": "0", "bytes": len(ARCHIVE), "manifest_sha256": "1"}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim
        safety: SafetySummary = {"gate": {"decision": "fail", "reasons": []}}
        assert lease.reject(session, claim, Rejection("No.", 1, [], safety, f"{folder}/report", held=held))
    return job_id


def test_no_route_serves_a_byte_of_weights_that_did_not_pass(service: Service, unsafe: str) -> None:
    client = service.client("org-customer", "admin", "customer")
    signing_key(service.app.state.settings)  # makes one
    model = f"ft:lab/tiny-1:org-customer::{unsafe.removeprefix('ftjob-')[:12]}"
    ids = UNKNOWN | {"job_id": unsafe, "model": model, "project_id": "org-customer"}
    ids |= {"file_id": client.get(FILES).json()["data"][0]["id"]}
    for verb, path, _ in routes(service):
        if verb == "get":
            got = client.get(fill_path(path, ids))
            assert ARCHIVE[:18] not in got.content, path
            assert got.status_code < 500, path
    assert client.get(f"{JOBS}/{unsafe}/adapter").json()["error"]["code"] == "safety_gate_failed"


def test_what_is_deleted_is_found_nowhere(
    service: Service, customer: TestClient, provider_with_model: TestClient, upload: Upload, tmp_path: Path
) -> None:
    content, secrets = secret_rows(10)
    file_id = upload(content).json()["id"]
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file_id}).json()["id"]
    service.app.state.storage.write(f"tenants/org-customer/jobs/{job_id}/a1/checkpoints/5/x", [secrets[0].encode()])
    assert holding(tmp_path, secrets[0])
    customer.post(f"{JOBS}/{job_id}/cancel")
    assert customer.delete(f"{JOBS}/{job_id}", params={"include_files": True}).status_code == 200
    customer.delete(f"{FILES}/{file_id}")
    assert [path for secret in secrets for path in holding(tmp_path, secret)] == []


def holding(folder: Path, secret: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]

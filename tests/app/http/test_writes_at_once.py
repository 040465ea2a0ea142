"""What a provider writes at the same moment as others wins or is refused: no route answers with a server error.

The routes are read from the OpenAPI document, so that a new one without a race here fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine, text

from app import db
from app.checkpoints import records
from app.db.tables import BaseModelEntry, WebhookDelivery, WebhookEndpoint
from app.db.tables.job_records import Adapter
from app.jobs import lease
from app.settings import Settings
from app.signing import signing_key
from tests.app.http.conftest import JOBS, Service, jsonl, pool
from tests.app.http.test_waivers import ASK, reject
from tests.app.parts import epoch_end

AT_ONCE = 8
Names = dict[str, Any]
Write = Callable[[TestClient, Names, int], httpx2.Response]


def file(n: int, content: bytes) -> dict[str, Any]:
    return {"file": ("rows.jsonl", content + jsonl({"prompt": f"Only in version {n}", "safe": "No."}))}


def suite(n: int) -> dict[str, Any]:
    return {"file": ("rows.jsonl", jsonl({"prompt": f"Only in version {n}"}))}


# What each of eight admins sends at the same moment, by route; a name in braces is filled in from `names`.
WRITES: dict[str, Write] = {
    "POST /v1/admin/models": lambda http, at, n: http.post(
        "/v1/admin/models", json={"alias": "new", "source": at["folder"], "learning_rate": n / 100 + 0.01}
    ),
    "POST /v1/admin/pools": lambda http, at, n: http.post("/v1/admin/pools?name=new", files=file(n, pool())),
    "DELETE /v1/admin/pools/{corpus_id}": lambda http, at, n: http.delete(f"/v1/admin/pools/{at['pool']}"),
    "POST /v1/admin/suites": lambda http, at, n: http.post("/v1/admin/suites?name=new&kind=benign", files=suite(n)),
    "DELETE /v1/admin/suites/{corpus_id}": lambda http, at, n: http.delete(f"/v1/admin/suites/{at['suite']}"),
    "POST /v1/admin/policies": lambda http, at, n: http.post("/v1/admin/policies", json={"waivers": n % 2 == 0}),
    "DELETE /v1/admin/models/{alias}": lambda http, at, n: http.delete("/v1/admin/models/lab/tiny-1"),
    "POST /v1/admin/pools/preview": lambda http, at, n: http.post(
        "/v1/admin/pools/preview?name=new", files=file(n, pool())
    ),
    "POST /v1/admin/suites/preview": lambda http, at, n: http.post(
        "/v1/admin/suites/preview?name=new&kind=benign", files=suite(n)
    ),
    "POST /v1/admin/policies/dry_run": lambda http, at, n: http.post("/v1/admin/policies/dry_run", json={}),
    "POST /v1/admin/jobs/{job_id}/waivers/{waiver_id}/end": lambda http, at, n: http.post(
        f"{at['waivers']}/{at['waiver']}/end"
    ),
    "DELETE /v1/admin/projects/{project_id}/stored_replies": lambda http, at, n: http.delete(
        f"/v1/admin/projects/{at['project']}/stored_replies"
    ),
    "POST /v1/admin/webhook_deliveries/{delivery_id}/replay": lambda http, at, n: http.post(
        f"/v1/admin/webhook_deliveries/{at['delivery']}/replay"
    ),
    "POST /v1/admin/jobs/{job_id}/waivers": lambda http, at, n: http.post(at["waivers"], json=ASK),
    "POST /v1/admin/jobs/{job_id}/waivers/{waiver_id}/approve": lambda http, at, n: http.post(
        f"{at['waivers']}/{at['waiver']}/approve"
    ),
    "POST /v1/admin/jobs/{job_id}/later_audits": lambda http, at, n: http.post(at["later_audits"], json={"step": 5}),
    "POST /v1/admin/reply_labels": lambda http, at, n: http.post(
        "/v1/admin/reply_labels", json={"model": "lab/tiny-1", "count": 1}
    ),
    "POST /v1/admin/reply_labels/{reply_id}": lambda http, at, n: http.post(
        f"/v1/admin/reply_labels/{at['reply']}", json={"score": n % 5 + 1}
    ),
    "POST /v1/admin/projects": lambda http, at, n: http.post("/v1/admin/projects", json={"name": "new"}),
    "POST /v1/admin/projects/{project_id}/quota": lambda http, at, n: http.post(
        f"/v1/admin/projects/{at['project']}/quota", json={"max_unfinished_jobs": n + 1}
    ),
    "POST /v1/admin/keys": lambda http, at, n: http.post(
        "/v1/admin/keys", json={"project_id": at["project"], "name": "new"}
    ),
    "POST /v1/admin/keys/{key_id}/rotate": lambda http, at, n: http.post(f"/v1/admin/keys/{at['key']}/rotate"),
    "DELETE /v1/admin/keys/{key_id}": lambda http, at, n: http.delete(f"/v1/admin/keys/{at['key']}"),
    "POST /v1/fine_tuning/checkpoints/{model}/permissions": lambda http, at, n: http.post(
        at["permissions"], json={"project_ids": ["org-a", "org-b"]}
    ),
    "DELETE /v1/fine_tuning/checkpoints/{model}/permissions/{permission_id}": lambda http, at, n: http.delete(
        f"{at['permissions']}/{at['permission']}"
    ),
}
# How many of the eight can win; all, unless it is named here.
# Who asks again while bytes are still being deleted goes on with that, and is told the same.
ASKED_AGAIN = frozenset({"DELETE /v1/admin/pools/{corpus_id}", "DELETE /v1/admin/suites/{corpus_id}"})
WINNERS = {
    "DELETE /v1/admin/models/{alias}": 1,
    "POST /v1/admin/jobs/{job_id}/later_audits": 1,
    "POST /v1/admin/jobs/{job_id}/waivers/{waiver_id}/approve": 1,
    "POST /v1/admin/jobs/{job_id}/waivers/{waiver_id}/end": 1,
    "DELETE /v1/fine_tuning/checkpoints/{model}/permissions/{permission_id}": 1,
}


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    signing_key(Settings(data_dir=tmp_path))  # makes one
    return Settings(data_dir=tmp_path, database_url=SecretStr(database_url), signing_key=tmp_path / "signing_key.pem")


@pytest.fixture
def other(service: Service) -> TestClient:
    """An admin of the provider who is not the one that proposes."""
    return service.client("org-customer", "admin", owner="Bob")


@pytest.fixture
def names(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Names, tmp_path: Path
) -> Names:
    """One of everything that a provider's routes name."""
    provider_with_model.post("/v1/admin/policies", json={"transcripts": True})
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    _fail_the_gate(service, job_id, tmp_path)
    said = {"suite": "s", "kind": "harmful", "category": None, "hit": False, "score": 1, "note": "", "prompt": "p"}
    lines = (json.dumps(said | {"reply": f"Reply {n}"}) + "\n" for n in range(2 * AT_ONCE))
    service.app.state.storage.write(f"tenants/org-customer/jobs/{job_id}/transcripts.jsonl", ["".join(lines).encode()])
    provider_with_model.post("/v1/admin/reply_labels", json={"model": "lab/tiny-1", "count": 1})
    one, checkpoint = service.client("org-customer", "admin", owner="Ada"), customer.get(f"{JOBS}/{job_id}/checkpoints")
    waivers = f"/v1/admin/jobs/{job_id}/waivers"
    model = checkpoint.json()["data"][0]["fine_tuned_model_checkpoint"]
    permissions = f"/v1/fine_tuning/checkpoints/{model}/permissions"
    project = provider_with_model.post("/v1/admin/projects", json={"name": "p"}).json()["id"]
    key = provider_with_model.post("/v1/admin/keys", json={"project_id": project, "name": "k"}).json()["key"]["id"]
    return {
        "folder": str(tmp_path / "model"),
        "pool": provider_with_model.post("/v1/admin/pools?name=old", files=file(0, pool())).json()["id"],
        "suite": provider_with_model.post("/v1/admin/suites?name=old&kind=benign", files=suite(0)).json()["id"],
        "waivers": waivers,
        "reply": one.get("/v1/admin/reply_labels?model=lab/tiny-1").json()["next"]["id"],
        "later_audits": f"/v1/admin/jobs/{job_id}/later_audits",
        "waiver": one.post(waivers, json=ASK).json()["id"],
        "permissions": permissions,
        "permission": one.post(permissions, json={"project_ids": ["org-z"]}).json()["data"][0]["id"],
        "project": project,
        "key": key,
        "delivery": _delivery(service),
    }


def _delivery(service: Service) -> str:
    """Return a webhook's delivery that was given up."""
    with db.transaction(service.app.state.engine) as session:
        endpoint = WebhookEndpoint(project_id="org-customer", url="https://example.com", events=[], secret="whsec_x")
        session.add(endpoint)
        session.flush()
        made = WebhookDelivery(endpoint_id=endpoint.id, event_id="evt_1", type="fine_tuning.job.failed", job_id="j")
        made.status = "failed"
        session.add(made)
        session.flush()
        return made.id


def test_every_route_by_which_a_provider_writes_has_a_race(service: Service) -> None:
    routes = {
        f"{verb.upper()} {path}"
        for path, verbs in service.app.openapi()["paths"].items()
        for verb in verbs.keys() & {"post", "put", "patch", "delete"}
        if path.startswith("/v1/admin/") or "/checkpoints/{model}" in path
    }
    assert routes == WRITES.keys()


@pytest.mark.parametrize("route", WRITES)
def test_eight_at_the_same_moment_win_or_are_refused(
    route: str, service: Service, other: TestClient, names: Names
) -> None:
    ready = Barrier(AT_ONCE)

    def write(n: int) -> httpx2.Response:
        client = TestClient(service.app, headers=dict(other.headers), raise_server_exceptions=False)
        ready.wait(timeout=60)
        return WRITES[route](client, names, n)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(write, range(AT_ONCE)))
    found = Counter(answer.status_code for answer in answers)
    assert all(status < 500 for status in found), [answer.text for answer in answers if answer.status_code >= 500]
    if route in ASKED_AGAIN:
        assert found[200] >= 1, [answer.text for answer in answers]
        assert found[200] + found[404] == AT_ONCE, [answer.text for answer in answers]
    else:
        assert found[200] == WINNERS.get(route, AT_ONCE), [answer.text for answer in answers]


def test_versions_of_one_name_are_counted_without_gaps(
    service: Service, provider_with_model: TestClient, names: Names
) -> None:
    def import_version(n: int) -> Any:
        client = TestClient(service.app, headers=dict(provider_with_model.headers))
        return client.post("/v1/admin/pools?name=new", files=file(n, pool())).json()["version"]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert sorted(threads.map(import_version, range(AT_ONCE))) == list(range(1, AT_ONCE + 1))


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # a writer on SQLite is alone
def test_a_row_that_a_process_of_the_version_before_makes_first_is_a_conflict(
    names: Names, service: Service, other: TestClient
) -> None:
    """It takes no turns: ours waits for its row, and finds it there."""
    engine = service.app.state.engine
    entry = {"alias": "new", "source": names["folder"]}
    with ThreadPoolExecutor(1) as thread:
        with db.transaction(engine) as session:
            session.add(BaseModelEntry(**entry))
            session.flush()
            answer = thread.submit(other.post, "/v1/admin/models", json=entry)
            while not _waits(engine):
                assert not answer.done(), answer.result().text
        refused = answer.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert other.post("/v1/admin/models", json=entry).status_code == 200


def _waits(engine: Engine) -> bool:
    """Whether somebody waits for a lock in this database."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.execute(text(waiting)).scalar())


def _fail_the_gate(service: Service, job_id: str, folder: Path) -> None:
    """Leave a checkpoint of the queued job and an adapter that was held back."""
    (folder / "adapter").mkdir()
    (folder / "adapter" / "manifest.json").write_text("{}")
    (folder / "adapter.tar.gz").write_bytes(b"an archive")
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        archive: Adapter = {"storage_key": "epoch", "sha256": "0", "bytes": 1}
        assert records.record(session, claim, {5: epoch_end(0.5, "pass", archive)})
        assert lease.release(session, claim, "a test")
    reject(service, job_id, folder / "adapter.tar.gz")

"""What a project may take up: limits that hold for parallel requests too, rates, and usage."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import update

from app import db
from app.db.tables import Job
from app.jobs import lease
from app.jobs.lease import reap
from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Service, Upload, chat, jsonl, offer, rows

QUOTA = "/v1/admin/projects/org-customer/quota"


def limit(provider: TestClient, **limits: Any) -> None:
    got = provider.post(QUOTA, json=limits)
    assert (got.status_code, got.json()["id"]) == (200, "org-customer")


def is_refused(got: Any) -> bool:
    error = got.json().get("error") or {}
    facts = (got.status_code, error.get("type"), error.get("code"), got.headers.get("x-should-retry"))
    return facts == (429, "insufficient_quota", "quota_exceeded", "false")


@pytest.fixture
def parallel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """The application on PostgreSQL, where requests do run at the same time."""
    url = SecretStr(request.getfixturevalue("postgres_url"))
    app = create_app(Settings(data_dir=tmp_path, database_url=url))
    with TestClient(app) as http:
        yield Service(app, http)


def test_fifty_submits_at_once_at_a_quota_of_one_make_one_job(parallel: Service, tmp_path: Path) -> None:
    provider, customer = (
        parallel.client("org-provider", "admin", "customer"),
        parallel.client("org-customer", "customer"),
    )
    offer(provider, tmp_path / "model")
    file = customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    limit(provider, max_unfinished_jobs=1)
    clients, together = parallel.clients(50, "org-customer", "customer"), Barrier(50)

    def submit(client: TestClient) -> Any:
        together.wait()
        return client.post(JOBS, json={"model": "lab/tiny-1", "training_file": file["id"]})

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(submit, clients))
    assert sorted(each.status_code for each in answers) == [200] + [429] * 49
    assert sum(map(is_refused, answers)) == 49
    assert len(customer.get(JOBS).json()["data"]) == 1


def test_uploads_at_once_do_not_pass_the_bytes_of_a_project(parallel: Service) -> None:
    provider, customer = parallel.client("org-provider", "admin"), parallel.client("org-customer", "customer")
    limit(provider, max_file_bytes=2 * len(rows(10)))
    together = Barrier(8)

    def send(client: TestClient) -> Any:
        together.wait()
        return client.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, parallel.clients(8, "org-customer", "customer")))
    assert [each.status_code for each in answers].count(200) == 2
    assert sum(map(is_refused, answers)) == 6
    assert len(customer.get(FILES).json()["data"]) == 2
    kept = [path for path in (parallel.app.state.storage._root / "tenants").rglob("*") if path.is_file()]
    assert len(kept) == 2


def test_uploads_in_parts_are_held_to_the_bytes_of_a_project(
    provider_with_model: TestClient, customer: TestClient
) -> None:
    """What is announced counts, and parts beyond it: neither can pass the limit, whatever is completed in the end."""
    limit(provider_with_model, max_file_bytes=1_000)
    ask = {"filename": "a.jsonl", "purpose": "fine-tune", "mime_type": "text/jsonl"}
    assert is_refused(customer.post("/v1/uploads", json=ask | {"bytes": 8 << 30}))
    path = f"/v1/uploads/{customer.post('/v1/uploads', json=ask | {'bytes': 600}).json()['id']}/parts"
    assert is_refused(customer.post("/v1/uploads", json=ask | {"bytes": 600}))
    assert customer.post(path, files={"data": ("upload", bytes(600))}).status_code == 200
    assert is_refused(customer.post(path, files={"data": ("upload", bytes(600))}))
    assert customer.post(path, files={"data": ("upload", bytes(400))}).status_code == 200
    assert is_refused(customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(5))}))
    (used,) = provider_with_model.get("/v1/admin/usage").json()["data"]
    assert (used["project_id"], used["file_bytes"], used["pending_bytes"]) == ("org-customer", 0, 1_000)
    customer.post(path.replace("/parts", "/cancel"))
    assert provider_with_model.get("/v1/admin/usage").json()["data"] == []
    assert customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(5))}).status_code == 200


def test_a_job_that_has_ended_makes_room(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    limit(provider_with_model, max_unfinished_jobs=1)
    first = customer.post(JOBS, json=job_body)
    assert is_refused(customer.post(JOBS, json=job_body))
    customer.post(f"{JOBS}/{first.json()['id']}/cancel")
    assert customer.post(JOBS, json=job_body).status_code == 200


def test_jobs_of_a_day_count_when_they_are_erased_too(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    limit(provider_with_model, max_jobs_per_day=1)
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    assert customer.delete(f"{JOBS}/{job_id}").status_code == 200
    assert is_refused(customer.post(JOBS, json=job_body))


def test_a_repeated_request_is_answered_at_the_limit(
    provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    limit(provider_with_model, max_unfinished_jobs=1)
    once = {"idempotency-key": "once"}
    answers = [customer.post(JOBS, json=job_body, headers=once).json()["id"] for _ in range(2)]
    assert answers[0] == answers[1]


def test_rows_are_limited(provider_with_model: TestClient, upload: Upload) -> None:
    limit(provider_with_model, max_file_rows=12)
    assert upload(rows(10)).status_code == 200
    assert is_refused(upload(rows(3)))
    assert upload(jsonl(chat("1"), chat("2"))).status_code == 200


def test_a_project_without_limits_is_not_limited_by_those_of_others(
    provider_with_model: TestClient, stranger: TestClient
) -> None:
    provider_with_model.post("/v1/admin/projects/org-stranger/quota", json={})
    limit_others = provider_with_model.post("/v1/admin/projects/org-provider/quota", json={"max_file_rows": 0})
    assert limit_others.json()["quota"]["max_file_rows"] == 0
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    assert stranger.post(FILES, **form).status_code == 200


def _work(service: Service, seconds: float) -> lease.Claim:
    """A worker takes the job and is seen to hold it for so long."""
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        session.execute(update(Job).values(seen_at=Job.seen_at - seconds))
        assert lease.heartbeat(session, claim, 60)
    return claim


def test_the_seconds_of_every_attempt_are_counted_and_limited(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    limit(provider_with_model, max_gpu_seconds=300)
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    claim = _work(service, 100)
    with db.transaction(service.app.state.engine) as session:
        assert lease.release(session, claim, "a test")
        session.execute(update(Job).values(seen_at=Job.seen_at - 1000))  # nobody works on it meanwhile
    assert customer.post(JOBS, json=job_body).status_code == 200
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Job).where(Job.id != job_id).values(run_after=time.time() + 1000))
    claim = _work(service, 250)
    with db.transaction(service.app.state.engine) as session:
        assert lease.fail(session, claim, {"code": "gpu_oom", "message": "no memory", "param": None})
    assert is_refused(customer.post(JOBS, json=job_body))

    (used,) = [
        row for row in provider_with_model.get("/v1/admin/usage").json()["data"] if row["project_id"] == "org-customer"
    ]
    assert used["gpu_seconds"] == pytest.approx(350, abs=60)
    assert (used["jobs"], used["file_rows"], used["file_bytes"]) == (2, 10, len(rows(10)))


def test_usage_is_of_the_time_asked_for_and_outlives_an_erasure(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    claim = _work(service, 100)
    with db.transaction(service.app.state.engine) as session:
        assert lease.confirm_cancel(session, claim)
    customer.delete(f"{JOBS}/{job_id}")

    def seconds(**query: int) -> float:
        data = provider_with_model.get("/v1/admin/usage", params=query).json()["data"]
        return sum((float(row["gpu_seconds"]) for row in data if row["project_id"] == "org-customer"), 0.0)

    now = int(time.time())
    assert seconds() == pytest.approx(100, abs=60)
    assert (seconds(start_time=now + 60), seconds(end_time=now - 60)) == (0, 0)


def test_a_lost_worker_s_time_counts_to_the_end_of_its_lease(service: Service, job_body: dict[str, Any]) -> None:
    customer = service.client("org-customer", "customer")
    customer.post(JOBS, json=job_body)
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, "worker", 60)
        earlier = {"seen_at": Job.seen_at - 500, "lease_expires_at": Job.lease_expires_at - 500}
        session.execute(update(Job).values(earlier))
        assert reap(session)
    with db.read(service.app.state.engine) as session:
        assert session.query(Job.gpu_seconds).scalar() == pytest.approx(60, abs=1)


def test_a_project_that_asks_too_fast_is_told_how_long_to_wait(
    provider_with_model: TestClient, customer: TestClient
) -> None:
    limit(provider_with_model, requests_per_minute=3)
    answers = [customer.get(FILES) for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    assert [each.headers["x-ratelimit-remaining-requests"] for each in answers] == ["2", "1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert re.fullmatch(r"1m0s|\d+s|\d+ms", answers[0].headers["x-ratelimit-reset-requests"])
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 60
    assert provider_with_model.get(FILES).status_code == 200


def test_the_official_client_sees_a_quota_as_a_rate_limit_error_and_does_not_try_again(
    provider_with_model: TestClient, service: Service, url: str
) -> None:
    sent: list[object] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    key = service.add_key("org-customer", "customer")
    limit(provider_with_model, max_file_rows=1)
    with (
        openai.OpenAI(base_url=url, api_key=key, max_retries=5, http_client=http) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.files.create(file=("a.jsonl", rows(10)), purpose="fine-tune")
    assert caught.value.code == "quota_exceeded"
    assert len(sent) == 1

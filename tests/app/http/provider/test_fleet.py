"""The fleet: workers as they tell of themselves, the queue by project, and the jobs of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.commands.doctor import deployment
from app.db.tables import WorkerRow
from app.db.tables.jobs import ALIVE_S
from app.jobs import fleet, lease, needs
from app.jobs.fleet import Presence
from app.retention import prune
from tests.app.http.conftest import JOBS, Service, rows

HERE = Presence("gpu-1:7", "gpu-1", "1.0.0", ["NVIDIA H100, 80 GiB"], [])


def note(service: Service, presence: Presence) -> None:
    with db.transaction(service.app.state.engine) as session:
        fleet.note(session, presence)


def set_last_seen(service: Service, ago_s: float) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WorkerRow).values(seen_at=db.now() - ago_s))


@pytest.fixture
def running(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job that the worker has, and one that waits."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(JOBS, json=job_body | {"suffix": "second"})
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, HERE.name, 60)
    return job_id


def test_a_worker_shows_with_what_it_does(service: Service, provider: TestClient, running: str) -> None:
    note(service, HERE)
    (worker,) = provider.get("/v1/admin/workers").json()["data"]
    assert (worker["name"], worker["devices"], worker["is_alive"]) == ("gpu-1:7", ["NVIDIA H100, 80 GiB"], True)
    assert (worker["job_id"], worker["phase"]) == (running, "validate")


def test_one_that_is_not_heard_of_is_not_alive_and_goes_after_a_day(service: Service, provider: TestClient) -> None:
    note(service, HERE)
    set_last_seen(service, 3600)
    assert [each["is_alive"] for each in provider.get("/v1/admin/workers").json()["data"]] == [False]
    set_last_seen(service, 100_000)
    prune(lambda: db.transaction(service.app.state.engine))
    assert provider.get("/v1/admin/workers").json()["data"] == []


def test_page_and_memory_rule_agree_on_who_is_alive_whatever_the_lease(service: Service) -> None:
    note(service, replace(HERE, memory_bytes=80 << 30))
    for settings in (service.app.state.settings, service.app.state.settings.model_copy(update={"lease_s": 900.0})):
        for ago_s, is_alive in ((ALIVE_S - 20, True), (ALIVE_S + 20, False)):
            set_last_seen(service, ago_s)
            with db.read(service.app.state.engine) as session:
                assert [each.is_alive for each in fleet.workers(session)] == [is_alive]
                assert bool(needs.gpu_rooms(session)) == is_alive
                text = " ".join(each.text for each in deployment.work(session, settings))
                assert ("1 running" in text) == is_alive


def test_one_that_stops_leaves(service: Service, provider: TestClient) -> None:
    note(service, HERE)
    with db.transaction(service.app.state.engine) as session:
        fleet.leave(session, HERE.name)
    assert provider.get("/v1/admin/workers").json()["data"] == []


def test_the_queue_has_shares_and_turns(provider: TestClient, running: str) -> None:
    file = provider.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()["id"]
    provider.post(JOBS, json={"model": "lab/tiny-1", "training_file": file})
    first, second = provider.get("/v1/admin/queue").json()["data"]
    assert (first["project_id"], first["turn"], first["running"], first["queued"]) == ("org-provider", 1, 0, 1)
    assert (second["project_id"], second["turn"], second["share"], second["queued"]) == ("org-customer", 2, 1.0, 1)
    assert [(each["gpu_share"], each["weight"]) for each in (first, second)] == [(0.0, 1.0), (1.0, 1.0)]
    assert provider.post("/v1/admin/projects/org-customer/quota", json={"weight": 3}).json()["quota"]["weight"] == 3
    assert provider.post("/v1/admin/projects/org-customer/quota", json={"weight": 0}).status_code == 400
    second = provider.get("/v1/admin/queue").json()["data"][1]
    assert (second["project_id"], second["weight"], second["turn"]) == ("org-customer", 3.0, 2)


def test_jobs_of_all_projects_are_found(provider: TestClient, customer: TestClient, running: str) -> None:
    found = provider.get("/v1/admin/jobs").json()["data"]
    assert [each["organization_id"] for each in found] == ["org-customer"] * 2
    for query, count in (
        (f"search={running}", 1),
        ("search=second", 1),
        ("status=running", 1),
        ("project_id=org-none", 0),
        ("project_id=org-customer&status=queued", 1),
        (f"after={found[0]['id']}", 1),
    ):
        assert len(provider.get(f"/v1/admin/jobs?{query}").json()["data"]) == count, query
    for path in ("jobs", "workers", "queue"):
        assert customer.get(f"/v1/admin/{path}").status_code == 403


def test_the_pages_show_it(service: Service, browser: TestClient, provider: TestClient, running: str) -> None:
    assert "No worker is there; jobs wait" in browser.get("/provider").text
    note(service, Presence(HERE.name, "gpu-<1>", "1.0.0", HERE.devices, ["disk"]))
    page = browser.get("/provider").text
    assert "1 of 1 workers at work, 1 job waits." in page
    assert "trouble: disk" in page
    assert "gpu-&lt;1&gt;" in page
    assert f'href="/provider/jobs/{running}"' in page
    jobs = browser.get(f"/provider/jobs?search={running}").text
    assert running in jobs
    assert "second" not in jobs
    assert browser.get("/provider/jobs", headers={"hx-request": "true"}).text.lstrip().startswith("<div")

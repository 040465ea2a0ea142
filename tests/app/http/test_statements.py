"""How many statements of SQL a request costs: a handful, however many jobs there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jinja2 import Environment, Template
from sqlalchemy import Engine, event, insert, select

from app import db
from app.db.tables import Job, LaterAudit, Quota
from app.db.tables.job_records import Adapter, GateJson
from app.jobs import fleet, lease
from app.jobs.fleet import Presence
from app.jobs.lease import Publication, Rejection
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_job_page import FIGURES

QUEUED = 100
ROWS = 50  # of a page of jobs
MOST = 6
MOST_OF_FLEET = 11  # with the checklist of one base model
MOST_OF_POLICIES = 3  # the browser, all versions, the base models
BACKGROUND = {"outbox", "webhooks", "retention", "reaper", "garbage"}  # threads that ask the database too


@contextmanager
def count_statements(engine: Engine) -> Iterator[list[str]]:
    """The statements that requests send to the database meanwhile, but BEGIN."""
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if current_thread().name not in BACKGROUND and statement != "BEGIN":
            statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def queued_jobs(service: Service, customer: TestClient, job_body: dict[str, Any]) -> list[str]:
    """A hundred jobs of one project that wait."""
    first = customer.post(JOBS, json=job_body).json()["id"]
    table = Job.__table__
    with db.transaction(service.app.state.engine) as session:
        row = dict(session.execute(select(table).where(table.c.id == first)).one()._mapping)
        session.execute(insert(table), [row | {"id": f"ftjob-{i:03}"} for i in range(1, QUEUED)])  # type: ignore[arg-type]
    return [first, *(f"ftjob-{i:03}" for i in range(1, QUEUED))]


def test_a_list_of_queued_jobs_costs_a_handful(service: Service, customer: TestClient, queued_jobs: list[str]) -> None:
    customer.get(JOBS)  # notes the use of the key
    with count_statements(service.app.state.engine) as statements:
        jobs = customer.get(f"{JOBS}?limit=100").json()["data"]
    assert sorted(job["id"] for job in jobs) == sorted(queued_jobs)
    assert all(job["safety"]["progress"]["queue_position"] for job in jobs)
    assert len(statements) <= MOST, statements


READS = 2  # statements: the key with its project's limit, and what was asked for
_BY_ALL = re.compile(r"SEARCH jobs(_1)? USING .*(=\? AND .*|\((id|status)=\?)\)")  # not by the project alone


def test_a_read_costs_the_key_and_the_row(service: Service, customer: TestClient, queued_jobs: list[str]) -> None:
    customer.post(f"{JOBS}/{queued_jobs[0]}/cancel")
    with count_statements(service.app.state.engine) as statements:
        assert customer.get(f"{JOBS}/{queued_jobs[0]}").json()["status"] == "cancelled"
    assert len(statements) <= READS, statements


def test_a_new_job_reads_no_more_of_the_old_ones_the_more_there_are(
    service: Service, customer: TestClient, job_body: dict[str, Any], queued_jobs: list[str]
) -> None:
    """What it looks for among its project's jobs is found by an index of all that it names."""
    if (engine := service.app.state.engine).dialect.name != "sqlite":
        pytest.skip("SQLite tells its plan before it knows how many rows there are")
    sent: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if current_thread().name not in BACKGROUND and statement.startswith("SELECT") and "jobs" in statement:
            sent.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    assert customer.post(JOBS, json=job_body).status_code == 200
    event.remove(engine, "before_cursor_execute", note)
    with db.read(engine) as session:
        raw = session.connection().connection
        plans = [[row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {each}", values)] for each, values in sent]
    steps = [step for plan in plans for step in plan if " jobs" in step]
    assert any("fine_tuned_model=?" in step for step in steps)
    assert [step for step in steps if not _BY_ALL.match(step)] == []


PAGES = ("", "/jobs", "/policies", "/waivers", "/data", "/models", "/projects", "/projects/org-customer", "/webhooks")


@contextmanager
def signed_in_browser(service: Service, project: str, scope: str) -> Iterator[TestClient]:
    """A browser that was signed in with a new key."""
    browser = TestClient(service.app, headers={"accept": "text/html"})
    browser.post("/sign-in", data={"key": service.add_key(project, scope)})
    yield browser
    browser.close()


def test_the_provider_s_pages_cost_a_handful_too(
    service: Service, provider: TestClient, queued_jobs: list[str]
) -> None:
    with signed_in_browser(service, "org-provider", "admin") as browser:
        for page in (*PAGES, "/audit-log"):
            with count_statements(service.app.state.engine) as statements:
                answer = browser.get(f"/provider{page}")
            assert answer.status_code == 200, page
            most = {"": MOST_OF_FLEET, "/policies": MOST_OF_POLICIES}.get(page, MOST)
            assert len(statements) <= most, (page, statements)


@pytest.mark.parametrize(("place", "scope"), [("/jobs", "customer"), ("/provider/jobs", "admin")])
def test_a_list_of_jobs_loads_no_template_for_each_row(
    service: Service, queued_jobs: list[str], monkeypatch: pytest.MonkeyPatch, place: str, scope: str
) -> None:
    """To include a template takes longer than to render the row that includes it."""
    loaded: list[str] = []
    load = Environment.get_template

    def note(environment: Environment, name: str, *rest: Any, **more: Any) -> Template:
        loaded.append(name)
        return load(environment, name, *rest, **more)

    project = "org-customer" if scope == "customer" else "org-provider"
    with signed_in_browser(service, project, scope) as browser:
        monkeypatch.setattr(Environment, "get_template", note)
        page = browser.get(place).text
    assert sum(f'data-copy="{job_id}"' in page for job_id in queued_jobs) == ROWS
    assert loaded.count("job_status.html.jinja") == 1
    assert len(loaded) < ROWS


MOST_OF_JOB = 5
OWN_PAGES = ("/jobs", "/jobs/new", "/files", "/models", "/chat", "/compare")


def test_a_customer_s_pages_cost_a_handful_too(service: Service, customer: TestClient, queued_jobs: list[str]) -> None:
    with signed_in_browser(service, "org-customer", "customer") as browser:
        for page in OWN_PAGES:
            counted = []
            for _ in range(2):  # one of two requests may note the use of the key, on a machine that is slow enough
                with count_statements(service.app.state.engine) as statements:
                    answer = browser.get(page)
                assert answer.status_code == (400 if page == "/compare" else 200), page
                counted.append(statements)
            assert len(min(counted, key=len)) <= MOST, (page, counted)


def end(service: Service, gate: GateJson, report: str, file_id: str) -> None:
    """End the queued job as a worker would: trained and measured, and let through or not; then audited twice more."""
    service.app.state.storage.write(report, [json.dumps(FIGURES | {"gate": gate}).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.record_metrics(session, claim, {step: {"loss/task": 1 / step} for step in range(1, 6)})
        job = session.get_one(Job, claim.job_id)
        if gate["decision"] == "fail":
            assert lease.reject(session, claim, Rejection("No.", 10, [file_id], {"gate": gate}, report))
        else:
            adapter: Adapter = {"storage_key": "jobs/adapter", "sha256": "0" * 64, "bytes": 1}
            model = f"ft:lab/tiny-1:org-customer::{job.id}"
            made = Publication(model, 10, [file_id], adapter, {"gate": gate}, report)
            assert lease.publish(session, claim, made)
        again = {"job_id": job.id, "audit_version": 1, "asked_by": job.key_id}
        session.add_all(LaterAudit(round=turn, **again) for turn in (1, 2))


@pytest.fixture
def jobs(service: Service, customer: TestClient, job_body: dict[str, Any]) -> dict[str, str]:
    """Jobs on one file: without a defense, one that succeeded, one that failed, two that no worker has room for."""
    bare = job_body | {"safety": {"defense": {"type": "none"}}}
    owner, found = service.client("org-customer", "admin", "customer"), dict[str, str]()
    for name, decision in (("undefended", "pass"), ("succeeded", "pass"), ("failed", "fail")):
        found[name] = owner.post(JOBS, json=bare if name == "undefended" else job_body).json()["id"]
        end(service, {"decision": decision, "reasons": []}, f"jobs/{name}", job_body["training_file"])
    found |= {name: customer.post(JOBS, json=job_body).json()["id"] for name in ("queued", "waiting")}
    with db.transaction(service.app.state.engine) as session:
        for name in ("queued", "waiting"):
            session.get_one(Job, found[name]).memory_bytes = 2**40
        fleet.note(session, Presence("small", "small", "0", [], [], 2**30, 1))
    return found


@pytest.mark.parametrize(
    ("place", "project", "scope"), [("", "org-customer", "customer"), ("/provider", "org-provider", "admin")]
)
def test_the_page_of_a_job_costs_a_handful_too(
    service: Service, jobs: dict[str, str], place: str, project: str, scope: str
) -> None:
    """With all that can be on it: figures, files, a job without a defense, later audits; and a reason to wait."""
    with signed_in_browser(service, project, scope) as browser:
        for name, job_id in jobs.items():
            with count_statements(service.app.state.engine) as statements:
                page = browser.get(f"{place}/jobs/{job_id}").text
            if name in ("queued", "waiting"):
                assert "No worker can take this job." in page
            else:
                assert all(part in page for part in ('id="scores"', 'id="later-audits"', 'id="lengths"', "train.jsonl"))
            assert len(statements) <= MOST_OF_JOB + bool(place), (name, statements)  # its project
        row = f"{place}/jobs/{jobs['failed']}/risky-rows/{FIGURES['risky_rows'][0]['line']}"
        with count_statements(service.app.state.engine) as statements:
            assert browser.get(row).status_code == 200
        assert len(statements) <= MOST, statements


def test_jobs_side_by_side_cost_no_more_than_one(service: Service, jobs: dict[str, str]) -> None:
    with signed_in_browser(service, "org-customer", "customer") as browser:
        for names in (("succeeded", "failed"), ("succeeded", "failed", "queued", "waiting")):
            with count_statements(service.app.state.engine) as statements:
                answer = browser.get("/compare", params={"ids": [jobs[name] for name in names]})
            shown = [answer.text.index(f'"/jobs/{jobs[name]}"') for name in names]
            assert (answer.status_code, shown) == (200, sorted(shown))
            assert len(statements) <= MOST + 1, (names, statements)  # the losses of all of them in one


def test_the_page_of_a_file_costs_the_browser_and_the_row(service: Service, job_body: dict[str, Any]) -> None:
    with (
        signed_in_browser(service, "org-customer", "customer") as browser,
        count_statements(service.app.state.engine) as statements,
    ):
        assert browser.get(f"/files/{job_body['training_file']}").status_code == 200
    assert len(statements) <= READS, statements


def test_a_browser_is_recognized_by_one_statement_with_its_project_s_own_rate(service: Service) -> None:
    with signed_in_browser(service, "org-customer", "customer") as browser:
        with db.transaction(service.app.state.engine) as session:
            session.add(Quota(project_id="org-customer", requests_per_minute=2))
        with count_statements(service.app.state.engine) as statements:
            answers = [browser.get("/files").status_code for _ in range(3)]
    assert answers == [200, 200, 429]
    assert sum("browser_sessions" in each for each in statements) == 3
    assert not any("FROM quotas" in each for each in statements)

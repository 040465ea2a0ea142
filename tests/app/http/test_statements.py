"""How many statements of SQL a request costs: a handful, however many jobs there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, event, insert, select

from app import db
from app.db.tables import Job, Quota
from tests.app.http.conftest import JOBS, Service

QUEUED = 100
MOST = 6
BACKGROUND = {"outbox", "webhooks", "retention", "reaper", "garbage"}  # threads that ask the database too


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """The statements that requests send to the database meanwhile, but BEGIN."""
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if current_thread().name not in BACKGROUND and statement != "BEGIN":
            statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def queued(service: Service, customer: TestClient, asked: dict[str, Any]) -> list[str]:
    """A hundred jobs of one project that wait."""
    first = customer.post(JOBS, json=asked).json()["id"]
    table = Job.__table__
    with db.transaction(service.app.state.engine) as session:
        row = dict(session.execute(select(table).where(table.c.id == first)).one()._mapping)
        session.execute(insert(table), [row | {"id": f"ftjob-{i:03}"} for i in range(1, QUEUED)])  # type: ignore[arg-type]
    return [first, *(f"ftjob-{i:03}" for i in range(1, QUEUED))]


def test_a_list_of_queued_jobs_costs_a_handful(service: Service, customer: TestClient, queued: list[str]) -> None:
    customer.get(JOBS)  # notes the use of the key
    with counted(service.app.state.engine) as statements:
        jobs = customer.get(f"{JOBS}?limit=100").json()["data"]
    assert sorted(job["id"] for job in jobs) == sorted(queued)
    assert all(job["safety"]["progress"]["queue_position"] for job in jobs)
    assert len(statements) <= MOST, statements


READS = 2  # statements: the key with its project's limit, and what was asked for
_BY_ALL = re.compile(r"SEARCH jobs(_1)? USING .*(=\? AND .*|\((id|status)=\?)\)")  # not by the project alone


def test_a_read_costs_the_key_and_the_row(service: Service, customer: TestClient, queued: list[str]) -> None:
    customer.post(f"{JOBS}/{queued[0]}/cancel")
    with counted(service.app.state.engine) as statements:
        assert customer.get(f"{JOBS}/{queued[0]}").json()["status"] == "cancelled"
    assert len(statements) <= READS, statements


def test_a_new_job_reads_no_more_of_the_old_ones_the_more_there_are(
    service: Service, customer: TestClient, asked: dict[str, Any], queued: list[str]
) -> None:
    """What it looks for among its project's jobs is found by an index of all that it names."""
    if (engine := service.app.state.engine).dialect.name != "sqlite":
        pytest.skip("SQLite tells its plan before it knows how many rows there are")
    sent: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if current_thread().name not in BACKGROUND and statement.startswith("SELECT") and "jobs" in statement:
            sent.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    assert customer.post(JOBS, json=asked).status_code == 200
    event.remove(engine, "before_cursor_execute", note)
    with db.read(engine) as session:
        raw = session.connection().connection
        plans = [[row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {each}", values)] for each, values in sent]
    steps = [step for plan in plans for step in plan if " jobs" in step]
    assert any("fine_tuned_model=?" in step for step in steps)
    assert [step for step in steps if not _BY_ALL.match(step)] == []


PAGES = ("", "/jobs", "/policies", "/waivers", "/data", "/models", "/projects", "/projects/org-customer", "/webhooks")


def test_the_provider_s_pages_cost_a_handful_too(service: Service, provider: TestClient, queued: list[str]) -> None:
    browser = TestClient(service.app, headers={"accept": "text/html"})
    browser.post("/sign-in", data={"key": service.add_key("org-provider", "admin")})
    for page in (*PAGES, "/audit-log"):
        with counted(service.app.state.engine) as statements:
            answer = browser.get(f"/provider{page}")
        assert answer.status_code == 200, page
        assert len(statements) <= MOST, (page, statements)
    browser.close()


OWN_PAGES = ("/jobs", "/jobs/new", "/files", "/models", "/chat", "/compare")


def test_a_customer_s_pages_cost_a_handful_too(service: Service, customer: TestClient, queued: list[str]) -> None:
    browser = TestClient(service.app, headers={"accept": "text/html"})
    browser.post("/sign-in", data={"key": service.add_key("org-customer", "customer")})
    for page in OWN_PAGES:
        with counted(service.app.state.engine) as statements:
            answer = browser.get(page)
        assert answer.status_code == (400 if page == "/compare" else 200), page
        assert len(statements) <= MOST, (page, statements)
    browser.close()


def test_a_browser_is_recognized_by_one_statement_with_its_project_s_own_rate(service: Service) -> None:
    browser = TestClient(service.app, headers={"accept": "text/html"})
    browser.post("/sign-in", data={"key": service.add_key("org-customer", "customer")})
    with db.transaction(service.app.state.engine) as session:
        session.add(Quota(project_id="org-customer", requests_per_minute=2))
    with counted(service.app.state.engine) as statements:
        answers = [browser.get("/files").status_code for _ in range(3)]
    assert answers == [200, 200, 429]
    assert sum("browser_sessions" in each for each in statements) == 3
    assert not any("FROM quotas" in each for each in statements)
    browser.close()

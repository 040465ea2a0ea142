"""A job that ended because of rows of its file: its page names them, and starts it again without them."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.jobs import events, lease
from spard.errors import RowsQuarantined, TooManyRowsDropped
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.app.http.test_dashboard import SignIn, sign_in, token  # noqa: F401 - fixture
from worker.failures import failure

LINES = [3, 5]


def fail(service: Service, error: Exception, lines: list[int], total: int | None) -> None:
    """End the queued job as a worker does whose row signal ends it: it reports the rows, then fails."""
    data: dict[str, Any] = {"action": "drop", "flagged": len(lines), "lines": lines}
    data |= {} if total is None else {"acted": total}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        events.append(session, claim.job_id, "warn", "message", "Rows answer what is refused.", data)
        # Events that are not about the rows because of which the job ended.
        events.append(session, claim.job_id, "info", "message", "Rows are held out.", {"lines": [1]})
        events.append(session, claim.job_id, "warn", "message", "Others are undecided.", {"flagged": 9, "asked": 4})
        assert lease.fail(session, claim, failure(error).error())


@pytest.fixture
def job_id(customer: TestClient, job_body: dict[str, Any], upload: Upload) -> str:
    job_body["training_file"] = upload(rows(14)).json()["id"]
    found: str = customer.post(JOBS, json=job_body).json()["id"]
    return found


@pytest.mark.parametrize("kind", [TooManyRowsDropped, RowsQuarantined])
def test_the_page_names_the_rows_and_starts_a_job_without_them(
    sign_in: SignIn, service: Service, customer: TestClient, job_id: str, job_body: dict[str, Any], kind: Any
) -> None:
    fail(service, kind("2 of 14 rows", "training_file"), LINES, 2)
    browser = sign_in()
    page = browser.get(f"/jobs/{job_id}")
    assert re.search(r'id="rows">.*?<p>Lines 3, 5 of <a href="/files/file-', page.text, re.DOTALL)
    assert "Start again without these 2 rows" in page.text
    answer = browser.post(f"/jobs/{job_id}/again", data={"form_token": token(page)}, follow_redirects=False)
    assert answer.status_code == 303
    made = customer.get(f"{JOBS}/{answer.headers['location'].removeprefix('/jobs/')}").json()
    old, new = (
        customer.get(f"{FILES}/{file}/content").content.splitlines()
        for file in (job_body["training_file"], made["training_file"])
    )
    assert new == [row for line, row in enumerate(old, start=1) if line not in LINES]


@pytest.mark.parametrize("total", [None, 1200])
def test_a_job_is_not_started_again_if_not_every_row_is_named(
    sign_in: SignIn, service: Service, customer: TestClient, job_id: str, total: int | None
) -> None:
    fail(service, TooManyRowsDropped("many rows", "training_file"), [*range(1, 101)], total)
    page = sign_in().get(f"/jobs/{job_id}").text
    assert f"59, 60 and {1140 if total else 40:,} more of" in page
    assert "Start again" not in page
    answer = customer.post(f"{JOBS}/{job_id}/clone", json={"without_risky_rows": True})
    assert answer.json()["error"]["code"] == "report_not_ready"


def test_a_job_that_failed_otherwise_names_no_rows(sign_in: SignIn, service: Service, job_id: str) -> None:
    fail(service, ValueError("odd"), LINES, 2)
    assert 'id="rows"' not in sign_in().get(f"/jobs/{job_id}").text

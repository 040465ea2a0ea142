"""The job of any project for the provider: the same figures, every look at a text logged, and nothing that writes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_clone import RISKY
from tests.app.http.test_dashboard import HTML, SignIn, sign_in  # noqa: F401 - a fixture
from tests.app.http.test_job_page import FIGURES
from tests.app.http.test_report import PAGE
from tests.app.http.test_transcripts import job_with_transcripts

fixtures = (job_with_transcripts,)
ANY = "/v1/admin/jobs"
SAME = ("", "/events", "/metrics", "/later_audits", "/safety", "/safety/verdict", "/safety/risky_rows", "/transcripts")
PAGES = ("", "/transcripts", "/transcripts/2", "/risky-rows/2")

ROWS: list[dict[str, Any]] = [row | {"excerpt": f"The words of line {row['line']}"} for row in RISKY]


@pytest.fixture
def job(service: Service, job_with_transcripts: str) -> str:
    """A customer's job with all figures, and with transcripts."""
    service.app.state.storage.write("jobs/report", [json.dumps(FIGURES | {"risky_rows": ROWS}).encode()])
    return job_with_transcripts


def looks(provider: TestClient, action: str) -> list[dict[str, Any]]:
    found = provider.get(f"/v1/admin/audit_log?action={action}").json()["data"]
    return [{"target": each["target"], "project": each["tenant_id"], **each["details"]} for each in found]


@pytest.mark.parametrize("part", SAME)
def test_the_provider_reads_what_the_project_reads(
    customer: TestClient, provider: TestClient, job: str, part: str
) -> None:
    answer, theirs = provider.get(f"{ANY}/{job}{part}"), customer.get(f"{JOBS}/{job}{part}")
    assert (answer.status_code, answer.json()) == (200, theirs.json())


def test_looks_at_texts_are_logged_with_who_looked(provider: TestClient, job: str) -> None:
    provider.get(f"{ANY}/{job}")
    provider.get(f"{ANY}/{job}/safety", headers=PAGE)
    assert looks(provider, "risky_row.shown") == looks(provider, "transcripts.shown") == []
    provider.get(f"{ANY}/{job}/safety")
    provider.get(f"{ANY}/{job}/safety/risky_rows")
    provider.get(f"{ANY}/{job}/transcripts?limit=2&after=1")
    seen = {"target": job, "project": "org-provider"}
    assert looks(provider, "risky_row.shown") == [seen | {"lines": [row["line"] for row in ROWS]}] * 2
    assert looks(provider, "transcripts.shown") == [seen | {"indices": [2, 3]}]


def test_the_page_shows_it_and_changes_nothing(browser: TestClient, provider: TestClient, job: str) -> None:
    assert f'href="/provider/jobs/{job}"' in browser.get("/provider/jobs").text
    page = browser.get(f"/provider/jobs/{job}").text
    assert "20 of 38 attacks succeeded" in page
    assert re.findall(r'<form[^>]*action="([^"]*)"', page) == ["/sign-out"]
    links = set(re.findall(r'(?:href|hx-get)="(/[^"#]*)"', page))
    links -= {"/jobs", "/v1/signing_keys"}  # for customers; and this service has none
    assert {link: status for link in links if (status := browser.get(link).status_code) != 200} == {}
    assert "The words of line" not in page


def test_its_texts_are_shown_on_a_click_and_logged(browser: TestClient, provider: TestClient, job: str) -> None:
    assert "Reply 1" not in browser.get(f"/provider/jobs/{job}/transcripts").text
    assert "Reply 1" in browser.get(f"/provider/jobs/{job}/transcripts/2").text
    line = ROWS[0]["line"]
    assert ROWS[0]["excerpt"] in browser.get(f"/provider/jobs/{job}/risky-rows/{line}").text
    assert looks(provider, "transcripts.shown") == [{"target": job, "project": "org-provider", "indices": [2]}]
    assert looks(provider, "risky_row.shown") == [{"target": job, "project": "org-provider", "line": line}]


def test_one_that_runs_is_looked_at_again_and_again(
    browser: TestClient, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    page = browser.get(f"/provider/jobs/{job_id}").text
    assert 'hx-trigger="every 5s"' in page
    assert "data-stream" not in page


@pytest.mark.parametrize("scopes", [("customer",), ("read",)])
def test_customers_learn_no_more_than_before(
    service: Service, customer: TestClient, job: str, scopes: tuple[str, ...]
) -> None:
    """An unknown job and another project's answer alike: with 404 where jobs are one's own, with 403 elsewhere."""
    other = service.client("org-stranger", *scopes)
    browser = TestClient(service.app, headers=HTML)
    browser.post("/sign-in", data={"key": service.add_key("org-stranger", *scopes)})
    for part in SAME:
        answers = [other.get(f"{JOBS}/{each}{part}") for each in (job, "ftjob-0")]
        assert {answer.status_code for answer in answers} == {404}
        answers = [other.get(f"{ANY}/{each}{part}") for each in (job, "ftjob-0")]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {
            (403, "insufficient_scope")
        }
    for part in PAGES:
        assert {browser.get(f"/jobs/{each}{part}").status_code for each in (job, "ftjob-0")} == {404}
        assert {browser.get(f"/provider/jobs/{each}{part}").status_code for each in (job, "ftjob-0")} == {403}


def test_the_provider_is_a_stranger_outside_of_its_pages(service: Service, browser: TestClient, job: str) -> None:
    """What only the project may do stays its own, and there is no such way under the provider's."""
    both = service.client("org-provider", "admin", "customer")
    for act in ("cancel", "pause", "resume", "clone"):
        assert both.post(f"{JOBS}/{job}/{act}").status_code == 404
        assert both.post(f"{ANY}/{job}/{act}").status_code == 404
    assert both.delete(f"{ANY}/{job}").status_code == 405
    assert both.get(f"{JOBS}/{job}/transcripts").status_code == 404
    assert browser.get(f"/jobs/{job}").status_code == 403  # a key with the scope admin alone
    for act in ("cancel", "again"):
        assert browser.post(f"/provider/jobs/{job}/{act}", data={"form_token": "x"}).status_code == 404


def test_an_unknown_job_is_told(browser: TestClient, provider: TestClient) -> None:
    answer = provider.get(f"{ANY}/ftjob-0/safety")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "fine_tune_not_found")
    assert browser.get("/provider/jobs/ftjob-0").status_code == 404

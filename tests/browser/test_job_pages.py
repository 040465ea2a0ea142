"""A job's page in a browser: one that the gate stopped, transcripts behind a click, and the way to another job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, BrowserContext, Page, expect

from app import db
from app.jobs import events, lease
from app.jobs.lease import Rejection
from tests.app.http.conftest import JOBS, Service, Upload, rows
from tests.app.http.test_job_page import FIGURES
from tests.app.http.test_transcripts import SAID, keep_transcripts
from tests.browser.test_dashboard import serious, sign_in
from tests.spard.parts import byte_tokenizer

REASON = "Attacks succeed in 20 of 38; at most 10 % may."


def stop(service: Service) -> None:
    """End the queued job as a worker does whose audit did not pass."""
    storage = service.app.state.storage
    storage.write("jobs/report", [json.dumps(FIGURES | {"gate": {"decision": "fail", "reasons": [REASON]}}).encode()])
    storage.write("jobs/transcripts.jsonl", ["".join(json.dumps(row) + "\n" for row in SAID).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        numbers = {step: {"loss/task": 2.0 / step, "loss/safe": 0.4} for step in range(1, 30)}
        assert lease.record_metrics(session, claim, numbers)
        rejection = Rejection(REASON, 10, [], {"gate": {"decision": "fail", "reasons": [REASON]}}, "jobs/report")
        assert lease.reject(session, claim, rejection)


def test_a_job_that_fails_the_gate(
    page: Page, service: Service, customer: TestClient, provider_with_model: TestClient, upload: Upload
) -> None:
    keep_transcripts(provider_with_model)
    file = upload(rows(14)).json()["id"]
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file}).json()["id"]
    stop(service)
    sign_in(page, service)
    expect(page.get_by_text("held back")).to_be_visible()
    assert serious(page) == []
    page.get_by_role("link", name="train.jsonl").click()
    expect(page.get_by_text("Stopped by the safety gate")).to_be_visible()
    expect(page.get_by_text(REASON).first).to_be_visible()
    expect(page.get_by_role("heading", name="What now")).to_be_visible()
    page.get_by_role("button", name=f"Copy {job_id}").click()
    expect(page.get_by_role("button", name=f"Copy {job_id}")).to_have_text("Copied")
    expect(page.get_by_role("link", name="Download adapter")).to_have_count(0)
    assert serious(page) == []
    open_panel(page, "Data")
    assert serious(page) == []
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        why = page.get_by_role("columnheader", name="Why").bounding_box()
        assert why is not None
        assert why["width"] >= 160  # more than a word a line

    open_panel(page, "Safety")
    page.get_by_role("link", name="Transcripts").click()
    expect(page.get_by_text("Reply 1")).to_have_count(0)
    assert serious(page) == []
    page.get_by_role("link", name="Show number 2").click()
    expect(page.get_by_text("Reply 1")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    page.goto(f"/jobs/{job_id}#risky")
    page.get_by_role("button", name="Again without the 2 risky rows").click()
    expect(page.get_by_role("heading", name="Waiting for a worker.")).to_be_visible()
    shown: dict[str, Any] = customer.get(JOBS).json()["data"][0]
    assert shown["training_file"] != file


def test_a_link_to_a_section_opens_its_panel(
    browser: Browser, context: BrowserContext, service: Service, customer: TestClient, job_body: Any, url: str
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    stop(service)
    place = url.removesuffix("/v1")
    for each in (context, browser.new_context(base_url=place, java_script_enabled=False)):
        page = each.new_page()
        sign_in(page, service)
        page.goto(f"/jobs/{job_id}")
        expect(page.locator("#safety")).to_be_visible()
        expect(page.locator("#events")).to_be_hidden()
        expect(page.locator("#to-overview")).to_have_css("font-weight", "600")
        page.goto(f"/jobs/{job_id}#risky")
        expect(page.locator("#risky")).to_be_in_viewport()
        expect(page.locator("#safety")).to_be_hidden()
        open_panel(page, "Events")
        expect(page.locator("#events")).to_be_visible()
        expect(page.locator("#risky")).to_be_hidden()
        page.go_back()
        expect(page.locator("#risky")).to_be_visible()
        page.emulate_media(media="print")
        for panel in ("safety", "risky", "events"):
            expect(page.locator(f"#{panel}")).to_be_visible()
        each.close()


def open_panel(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="On this page").get_by_role("link", name=name, exact=True).click()


@pytest.fixture
def running(service: Service, customer: TestClient, job_body: Any) -> str:
    """A job that a worker has taken, with more events than its page shows at once."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, "worker", 600) is not None
        for number in range(30):
            events.append(session, job_id, "info", "message", f"Event {number} of many")
    return job_id


def test_news_of_a_job_leave_the_keyboard_where_it_is(page: Page, service: Service, running: str) -> None:
    sign_in(page, service)
    page.goto(f"/jobs/{running}")
    assert serious(page) == []
    for place in (page.get_by_role("button", name="Cancel"), page.get_by_role("list", name="Events")):
        place.focus()
        said = f"While {place} is in use"
        with db.transaction(service.app.state.engine) as session:
            events.append(session, running, "info", "message", said)
        expect(page.get_by_text(said)).to_be_visible(timeout=30_000)
        expect(place).to_be_focused()


def test_news_of_a_job_leave_the_open_panel_open(page: Page, service: Service, running: str) -> None:
    sign_in(page, service)
    page.goto(f"/jobs/{running}#artifacts")
    expect(page.locator("#artifacts")).to_be_visible()
    with db.transaction(service.app.state.engine) as session:
        events.append(session, running, "info", "message", "While files are shown")
    expect(page.locator("#event-list")).to_contain_text("While files are shown", timeout=30_000)
    expect(page.locator("#artifacts")).to_be_visible()
    expect(page.locator("#events")).to_be_hidden()


def test_a_page_that_gets_no_news_says_so_until_it_gets_some(context: Any, service: Service, running: str) -> None:
    page = context.new_page()
    sign_in(page, service)
    page.route("**/stream", lambda route: route.abort())
    page.goto(f"/jobs/{running}")
    told = page.get_by_role("status").filter(has_text="The connection to the service is lost")
    expect(told).to_be_visible(timeout=30_000)
    assert serious(page) == []
    page.unroute("**/stream")
    expect(told).to_have_count(0, timeout=30_000)


def test_another_like_this_with_one_change(
    context: Any, service: Service, customer: TestClient, job_body: Any, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    job_id = customer.post(JOBS, json=job_body | {"suffix": "acme", "lora": {"rank": 4}}).json()["id"]
    assert customer.post(f"{JOBS}/{job_id}/cancel").status_code == 200
    page = context.new_page()
    sign_in(page, service)
    page.goto(f"/jobs/{job_id}")
    page.get_by_role("link", name="Again with a change").click()
    expect(page.get_by_text("steps over about")).to_be_visible(timeout=30_000)
    page.get_by_label("Epochs", exact=True).fill("1000")
    page.get_by_label("Batch size").focus()
    expect(page.locator("#estimate")).to_contain_text("less than or equal to 50", timeout=30_000)
    page.get_by_role("button", name="Start the job").click()
    field = page.get_by_label("Epochs", exact=True)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#n_epochs-fault")).to_contain_text("less than or equal to 50")
    assert serious(page) == []
    field.fill("2")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="Waiting for a worker.")).to_be_visible()
    made = customer.get(JOBS).json()["data"][0]
    assert (made["hyperparameters"]["n_epochs"], made["lora"]["rank"]) == (2, 4)

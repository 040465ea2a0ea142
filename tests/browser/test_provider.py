"""What a provider does with a mouse: import a pool, try a policy and put it in force, release a held adapter in two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import BrowserContext, Page, expect

from app import db
from app.db.tables import WebhookDelivery, WebhookEndpoint
from app.jobs import fleet
from app.jobs.fleet import Presence
from tests.app.http.conftest import JOBS, Service, jsonl
from tests.app.http.test_policy_trial import measured_job
from tests.app.http.test_report import EVIL
from tests.app.http.test_waivers import ASK, failed_job, packed_adapter, reject
from tests.browser.test_dashboard import serious

fixtures = (measured_job, failed_job, packed_adapter)
ERRORS_SHOWN = "Failed to load resource: the server responded with a status of 400"  # Chromium's word on every form
PAGES = (
    "",
    "/jobs",
    "/policies",
    "/waivers",
    "/data",
    "/models",
    "/labels",
    "/projects",
    "/projects/org-evil",
    "/webhooks",
    "/audit-log",
    "/audit-log/verification",
)


@pytest.fixture
def page_with_mistakes(context: BrowserContext) -> Iterator[Page]:
    """A page on which forms are sent with mistakes; nothing else may go wrong."""
    page = context.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    yield page
    assert [each for each in told if not each.startswith(ERRORS_SHOWN)] == []


def sign_in(page: Page, service: Service, owner: str | None = None) -> None:
    page.goto("/sign-in")
    page.get_by_label("API key").fill(service.add_key("org-provider", "admin", owner=owner))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("navigation", name="Provider")).to_be_visible()


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Provider").get_by_role("link", name=name).click()


def test_a_pool_is_looked_at_and_imported(page: Page, service: Service, provider: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "pool.jsonl"
    rows = [{"prompt": f"Tell of stone {i} and its {EVIL}", "safe": "No."} for i in range(3)]
    file.write_bytes(jsonl(*rows) + b'{"prompt": "x"}\n')
    sign_in(page, service)
    open_tab(page, "Pools and suites")
    page.get_by_label("Name").fill("general-safe")
    page.get_by_label("File (.jsonl)").set_input_files(file)
    expect(page.get_by_role("heading", name="1 of 4 rows cannot be used")).to_be_visible()
    assert serious(page) == []
    mended = tmp_path / "mended.jsonl"
    mended.write_bytes(jsonl(*rows))
    page.get_by_label("File (.jsonl)").set_input_files(mended)
    expect(page.get_by_role("heading", name="3 rows, ready to be imported")).to_be_visible()
    expect(page.locator("#preview").get_by_text("Near duplicates", exact=True)).to_be_visible()
    assert serious(page) == []
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_role("heading", name="Imported: general-safe, version 1")).to_be_visible()
    assert [each["name"] for each in provider.get("/v1/admin/pools").json()["data"]] == ["general-safe"]


def test_a_policy_is_tried_mended_and_put_in_force(
    page_with_mistakes: Page,
    service: Service,
    provider: TestClient,
    measured_job: str,
) -> None:
    page = page_with_mistakes
    sign_in(page, service)
    open_tab(page, "Policies")
    page.get_by_text("What customers may choose").first.click()
    page.get_by_label("lisa").uncheck()
    page.get_by_label("spard", exact=True).uncheck()
    page.get_by_label("Attacks that succeed, at most").fill("200")
    page.get_by_role("button", name="Dry run over past jobs").click()
    expect(page.get_by_role("alert").first).to_contain_text("less than or equal to 100 %")
    assert serious(page) == []
    page.get_by_label("Attacks that succeed, at most").fill("50")
    page.get_by_label("Above the base model, at most", exact=False).first.fill("50")
    page.get_by_role("button", name="Dry run over past jobs").click()
    expect(page.get_by_role("heading", name="Dry run over the latest 1 job")).to_be_visible()
    row = page.get_by_role("row").filter(has_text=measured_job)
    expect(row).to_contain_text("refused")
    expect(row).to_contain_text("pass")
    assert serious(page) == []
    page.get_by_text("What customers may choose").first.click()
    page.get_by_label("spard", exact=True).check()
    page.get_by_role("button", name="Put in force").click()
    expect(page.get_by_role("row").filter(has_text="in force")).to_contain_text("2")
    assert provider.get("/v1/admin/policies").json()["data"][0]["content"]["thresholds"]["max_asr"] == 0.5


def test_one_proposes_and_another_approves(
    page_with_mistakes: Page,
    service: Service,
    customer: TestClient,
    failed_job: str,
) -> None:
    page = page_with_mistakes
    sign_in(page, service, "Ada")
    open_tab(page, "Waivers")
    page.get_by_label("Why it may leave all the same").fill("too short")
    page.get_by_role("button", name="Propose a waiver").click()
    expect(page.get_by_role("alert")).to_contain_text("at least 10 characters")
    assert serious(page) == []
    page.get_by_label("Why it may leave all the same").fill(f"Needed for a study {EVIL}")
    page.get_by_role("button", name="Propose a waiver").click()
    expect(page.get_by_text("waits for a second person")).to_be_visible()
    expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    page.get_by_role("button", name="Sign out").click()
    sign_in(page, service, "Bob")
    open_tab(page, "Waivers")
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("released", exact=True)).to_be_visible()
    assert serious(page) == []
    assert customer.get(f"{JOBS}/{failed_job}/adapter").status_code == 200


@pytest.fixture
def evil(
    service: Service, provider: TestClient, customer: TestClient, job_body: dict[str, Any], packed_adapter: Path
) -> None:
    """Markup in every text that somebody else writes."""
    job_id = customer.post(JOBS, json=job_body | {"suffix": EVIL.replace("/", "")}).json()["id"]
    reject(service, job_id, packed_adapter)
    with db.transaction(service.app.state.engine) as session:
        fleet.note(session, Presence("evil:1", EVIL, EVIL, [EVIL], [EVIL]))
        endpoint = WebhookEndpoint(project_id="org-customer", url=EVIL, events=[], secret="whsec_x")
        session.add(endpoint)
        session.flush()
        made = WebhookDelivery(endpoint_id=endpoint.id, event_id=EVIL, type="fine_tuning.job.failed", job_id=job_id)
        made.status, made.outcome = "failed", EVIL
        session.add(made)
    service.add_key("org-evil", "customer", owner=EVIL)
    service.add_key(EVIL, "customer")
    proposed = provider.post(f"/v1/admin/jobs/{job_id}/waivers", json=ASK | {"reason": f"Because of {EVIL}"})
    assert proposed.status_code == 200
    content = jsonl({"prompt": json.dumps(EVIL), "category": EVIL})
    provider.post("/v1/admin/suites?name=evil&kind=harmful", files={"file": ("s.jsonl", content)})


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_are_for_everybody_and_texts_stay_texts(page: Page, service: Service, evil: None, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    sign_in(page, service)
    page.goto("/provider/jobs")
    job = (page.locator("tbody a").first.get_attribute("href") or "").removeprefix("/provider")
    assert job.startswith("/jobs/ftjob-")
    for path in (*PAGES, job):
        page.goto(f"/provider{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert serious(page) == [], path
        assert page.evaluate("document.querySelectorAll('script:not([src])').length") == 0, path

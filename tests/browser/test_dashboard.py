"""What a person does with a mouse: the way from a key to a downloaded adapter, and what can go wrong on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from tests.app.http.conftest import JOBS, Service, rows
from tests.app.http.test_report import EVIL, REPORT
from tests.app.http.test_results import ARCHIVE, publish

SERIOUS = ("serious", "critical")
MEASURED: dict[str, Any] = REPORT | {
    "gate": {"decision": "pass", "reasons": []},
    "thresholds": {"max_asr": 0.1, "max_asr_rise": 0.1, "max_over_refusal_rise": 0.05},
    "seconds": {"train": 12.0, "audit": 4.0},
}


def sign_in(page: Page, service: Service, *scopes: str) -> None:
    page.goto("/")
    page.get_by_label("API key").fill(service.add_key("org-customer", *(scopes or ("customer",))))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


def serious(page: Page) -> list[str]:
    """What axe finds that keeps people with other senses or hands from using the page."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found if each["impact"] in SERIOUS]


def test_from_a_key_to_an_adapter(
    page: Page, service: Service, provider_with_model: TestClient, tmp_path: Path
) -> None:
    sign_in(page, service)
    assert serious(page) == []
    page.get_by_role("link", name="New job").first.click()
    assert serious(page) == []
    file = tmp_path / "chats.jsonl"
    file.write_bytes(rows(12))
    page.get_by_label("Training file").set_input_files(file)
    expect(page.get_by_role("heading", name="12 rows, ready to be trained on")).to_be_visible()
    assert serious(page) == []
    page.get_by_label("Name of the result").fill("acme")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="Waiting for a worker.")).to_be_visible()
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    expect(page.get_by_role("heading", name="20 of 40 attacks succeed on this model.")).to_be_visible(timeout=30_000)
    assert serious(page) == []
    with page.expect_download() as started:
        page.get_by_role("link", name="Download adapter").click()
    saved = tmp_path / "adapter.tar.gz"
    started.value.save_as(saved)
    assert saved.read_bytes() == ARCHIVE


def test_a_wrong_key_and_a_bad_file_are_told_where_they_are(
    context: Any, service: Service, provider_with_model: TestClient, tmp_path: Path
) -> None:
    page = context.new_page()
    page.goto("/jobs")
    page.get_by_label("API key").fill("sk-spard-nothing")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("The API key is not valid")
    assert serious(page) == []
    sign_in(page, service)
    page.goto("/jobs/new")
    file = tmp_path / "chats.jsonl"
    file.write_bytes(rows(12) + json.dumps({"messages": [{"role": EVIL, "content": EVIL}]}).encode())
    page.get_by_label("Training file").set_input_files(file)
    expect(page.get_by_role("heading", name="This file cannot be trained on")).to_be_visible()
    assert serious(page) == []


def test_a_file_is_taken_after_one_that_was_refused(
    context: Any, service: Service, provider_with_model: TestClient, tmp_path: Path
) -> None:
    page = context.new_page()
    sign_in(page, service)
    page.goto("/jobs/new")
    refused, good = tmp_path / "zipped.jsonl", tmp_path / "chats.jsonl"
    refused.write_bytes(b"PK\x03\x04")
    good.write_bytes(rows(12))
    page.get_by_label("Training file").set_input_files(refused)
    expect(page.get_by_text("The file is a ZIP archive")).to_be_visible()
    page.get_by_label("Training file").set_input_files(good)
    expect(page.get_by_role("heading", name="12 rows, ready to be trained on")).to_be_visible()


def test_a_file_is_dropped_on_the_zone_and_estimated(
    page: Page, service: Service, provider_with_model: TestClient
) -> None:
    sign_in(page, service)
    page.goto("/jobs/new")
    make = "text => { const data = new DataTransfer(); data.items.add(new File([text], 'chats.jsonl')); return data; }"
    page.dispatch_event(".zone", "drop", {"dataTransfer": page.evaluate_handle(make, rows(60).decode())})
    expect(page.get_by_role("heading", name="60 rows, ready to be trained on")).to_be_visible()
    work = page.locator("#estimate").get_by_text("steps over about")
    expect(work).to_be_visible()
    before = work.text_content() or ""
    page.get_by_label("Rows held out to measure the task").fill("off")
    page.get_by_label("Name of the result").fill("acme")  # leaving a field is what changes it
    expect(work).not_to_have_text(before)
    assert serious(page) == []


def test_an_upload_that_may_not_be_is_told_as_a_page(context: Any, service: Service, tmp_path: Path) -> None:
    """Somebody signs in with another key while the form is open."""
    page, other = context.new_page(), context.new_page()
    sign_in(page, service)
    page.goto("/jobs/new")
    context.clear_cookies()
    sign_in(other, service, "read")
    file = tmp_path / "chats.jsonl"
    file.write_bytes(rows(12))
    page.get_by_label("Training file").set_input_files(file)
    expect(page.get_by_role("heading", name="This form is not from this page")).to_be_visible()


@pytest.mark.parametrize("link", ["Report as one page", "Download adapter"])
def test_a_link_that_is_followed_too_late_asks_to_sign_in(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any], link: str
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    sign_in(page, service)
    page.goto(f"/jobs/{job_id}")
    page.context.clear_cookies()
    page.get_by_role("link", name=link).click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.get_by_label("API key").fill(service.add_key("org-customer", "customer"))
    if link == "Download adapter":
        with page.expect_download() as started:
            page.get_by_role("button", name="Sign in").click()
        assert started.value.path().read_bytes() == ARCHIVE
        expect(page.get_by_label("API key")).to_have_count(0)
        page.get_by_role("link", name="Go to the jobs").click()
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    else:
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("Safety report")).to_be_visible()


def test_a_refused_form_is_gone_on_with_at_the_first_wrong_field(
    context: Any, service: Service, job_body: dict[str, Any]
) -> None:
    page = context.new_page()
    sign_in(page, service)
    page.goto(f"/jobs/new?file={job_body['training_file']}")
    page.get_by_text("Numbers, if you want").click()
    for name in ("Batch size", "Seed"):
        page.get_by_label(name, exact=True).fill("-1")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_label("Batch size", exact=True)).to_be_focused()


def test_a_phone_shows_the_status_of_each_job(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    customer.post(JOBS, json=job_body | {"suffix": "a-name-of-some-length"})
    page.set_viewport_size({"width": 390, "height": 844})
    sign_in(page, service)
    box = page.locator("#jobs .status").first.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    name = page.get_by_role("link", name="a-name-of-some-length").bounding_box()
    assert name is not None
    assert name["x"] + name["width"] <= box["x"]
    assert serious(page) == []


def test_fields_of_a_line_stand_at_one_height(page: Page, service: Service, provider_with_model: TestClient) -> None:
    sign_in(page, service, "customer", "admin")
    for path, fields in (
        ("/jobs", ["Search", "Status"]),
        ("/provider/policies", ["Attacks that succeed, at most", "Above the base model, at most"]),
        ("/provider/policies", ["Its endpoint, of OpenAI's form", "Its name there"]),
    ):
        page.goto(path)
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        boxes = [page.get_by_label(name).first.bounding_box() for name in fields]
        places = {(round(box["y"]), round(box["height"])) for box in boxes if box is not None}
        assert len(places) == 1, (path, boxes)


def test_what_is_folded_is_printed(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    sign_in(page, service)
    page.goto(f"/v1/fine_tuning/jobs/{job_id}/safety")
    can_be_seen = "document.querySelector('details td').checkVisibility({contentVisibilityAuto: true})"
    assert not page.evaluate(can_be_seen)
    page.emulate_media(media="print")
    page.wait_for_function(can_be_seen)  # a style is computed anew with the next frame


def test_a_phone_shows_a_finding_whole(page: Page, service: Service, customer: TestClient) -> None:
    content = rows(12) + b'{"messages": [{"role": "User", "content": "rain"}]}\n'
    sent = {"file": ("bad.jsonl", content)}
    file = customer.post("/v1/files", files=sent, data={"purpose": "fine-tune"}).json()["id"]
    page.set_viewport_size({"width": 390, "height": 844})
    sign_in(page, service)
    page.goto(f"/files/{file}")
    found = page.get_by_role("region", name="What was found")
    expect(found.locator(".excerpt")).to_be_in_viewport()
    assert found.evaluate("region => region.scrollWidth <= region.clientWidth")
    assert serious(page) == []


LONG = "a_file_with_a_long_name" * 8 + ".jsonl"


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any], width: int
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    file = customer.post("/v1/files", files={"file": (LONG, rows(12))}, data={"purpose": "fine-tune"}).json()["id"]
    page.set_viewport_size({"width": width, "height": 800})
    sign_in(page, service, "customer", "admin")
    of_job = (f"/jobs/{job_id}", f"/jobs/new?from={job_id}")
    of_file = (f"/files/{file}", f"/jobs/new?file={file}")
    for path in ("/jobs", "/jobs/new", *of_job, "/files", *of_file, "/models", "/provider"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert serious(page) == [], path
        for last in page.get_by_role("columnheader", name="Uploaded").all():
            box = last.bounding_box()
            assert box is not None
            assert width < 1000 or box["x"] + box["width"] <= width, path  # a phone scrolls to it in the table

"""Links from words and codes to what they mean: none of them leads to nothing, and the keyboard reaches them."""

from __future__ import annotations

import json
from urllib.parse import urldefrag

from fastapi.testclient import TestClient
from playwright.sync_api import Page, ViewportSize, expect

from tests.app.http.conftest import JOBS, Service, Upload, rows
from tests.app.http.test_results import publish
from tests.browser.test_dashboard import MEASURED, serious, sign_in

PHONE: ViewportSize = {"width": 390, "height": 844}


def measure_job(service: Service, customer: TestClient, upload: Upload) -> str:
    """Return the id of a job that succeeded and has a report."""
    file = upload(rows(14)).json()["id"]
    job_id: str = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": file}).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    return job_id


def test_words_and_codes_lead_to_their_meanings(
    page: Page, service: Service, customer: TestClient, provider_with_model: TestClient, upload: Upload
) -> None:
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": upload(rows(14)).json()["id"]}).json()[
        "id"
    ]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    bad = upload(b'{"messages": []}\n' * 12).json()["id"]
    sign_in(page, service, "customer", "admin")
    linked = set[str]()
    for path in ("/jobs", f"/jobs/{job_id}", f"/files/{bad}", "/models", "/chat", "/provider", "/provider/policies"):
        page.goto(path)
        linked |= set(page.locator("a.term").evaluate_all("links => links.map(each => each.getAttribute('href'))"))
    assert len(linked) > 10
    for place in ("/help/terms", "/help/errors"):
        page.goto(place)
        assert serious(page) == []
        marks = {mark for mark in map(urldefrag, linked) if mark.url == place}
        assert marks
        assert [each.fragment for each in marks if page.locator(f"[id='{each.fragment}']").count() != 1] == []

    page.goto(f"/jobs/{job_id}")
    page.get_by_role("link", name="Wilson intervals").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#wilson-interval")).to_be_in_viewport()


def test_on_a_phone_a_job_s_tiles_stand_before_its_buttons(
    page: Page, service: Service, customer: TestClient, provider_with_model: TestClient, upload: Upload
) -> None:
    job_id = customer.post(JOBS, json={"model": "lab/tiny-1", "training_file": upload(rows(14)).json()["id"]}).json()[
        "id"
    ]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(MEASURED).encode()])
    sign_in(page, service)
    page.goto(f"/jobs/{job_id}")
    tiles = page.locator("dl.tiles:visible")
    expect(tiles).to_have_count(1)
    expect(page.locator("#panel-overview dl.tiles")).to_be_visible()
    page.set_viewport_size(PHONE)
    expect(tiles).to_have_count(1)
    (above, below) = (each.bounding_box() for each in (tiles, page.get_by_role("link", name="Download adapter")))
    assert above
    assert below
    assert above["y"] + above["height"] <= below["y"]
    assert above["y"] + above["height"] <= PHONE["height"]

"""Whether a job's task was learned, in a browser: two columns of replies, one below the other on a phone."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient
from playwright.sync_api import Locator, Page, expect

from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_results import publish
from tests.app.http.test_task_replies import FIGURES, write_results
from tests.browser.test_dashboard import serious, sign_in


def test_replies_of_both_models_stand_beside_each_other(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    write_results(service)
    sign_in(page, service)
    page.goto(f"/jobs/{job_id}")

    section = page.locator("#task")
    expect(section.get_by_role("heading", name="Did it learn your task?")).to_be_visible()
    expect(section).to_contain_text(FIGURES)
    base, tuned = (section.get_by_text(text) for text in ("I cannot help.", "It is at home."))
    expect(tuned).to_be_visible()
    assert serious(page) == []
    assert x_position(base) < x_position(tuned)

    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert x_position(base) == x_position(tuned)
    assert serious(page) == []


def x_position(place: Locator) -> float:
    """Return where an element begins, in pixels."""
    box = place.bounding_box()
    assert box is not None
    return box["x"]

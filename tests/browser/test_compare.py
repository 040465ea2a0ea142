"""Jobs side by side in a browser: their losses in one plot, and the better job marked."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from tests.app.http.conftest import Service
from tests.app.http.test_compare_page import STOPPED, Compare, result
from tests.browser.test_dashboard import serious, sign_in


def test_losses_and_the_better_job_are_legible_on_every_screen(
    page: Page, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    compare = Compare(service, customer, job_body, customer)
    for hits in (2, 40, 40, 30):
        results = [result("harmful", hits), result("benign", 3), result("utility", 80)]
        compare.end_job(results, STOPPED if hits == 30 else {"decision": "pass", "reasons": []})
    sign_in(page, service)
    page.goto("/compare?" + "&".join(f"ids={each}" for each in compare.ids))
    expect(page.get_by_text("✓ better")).to_have_count(1)
    plot = page.get_by_role("img", name="Training losses.")
    expect(plot).to_be_visible()
    looks = plot.locator("polyline").evaluate_all(
        "all => all.map(each => [getComputedStyle(each).stroke, getComputedStyle(each).strokeDasharray])"
    )
    assert len({color for color, _ in looks}) == len({dashes for _, dashes in looks}) == 4
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page) == []

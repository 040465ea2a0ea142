"""A person walks through 40 labels with the keys 1 to 5, and on a phone without a mouse or keyboard by touch."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from tests.app.http.conftest import Service
from tests.app.http.test_reply_labels import MODEL, labeled_job
from tests.app.http.test_report import EVIL
from tests.browser.test_dashboard import serious
from tests.browser.test_provider import open_tab, sign_in

fixtures = (labeled_job,)
LABELED = 40
PATIENCE_MS = 60_000  # for a page of a machine that others use too


def open_labels(page: Page, service: Service, provider: TestClient, count: int) -> None:
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    sign_in(page, service, "Ada")
    open_tab(page, "Labels")
    page.get_by_label("Replies").fill(str(count))
    page.get_by_role("button", name="Draw replies").click()
    expect(page.get_by_role("heading", name=f"Reply 1 of {count}")).to_be_visible(timeout=PATIENCE_MS)


def work(provider: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = provider.get(f"/v1/admin/reply_labels?model={MODEL}").json()
    return found


def test_forty_replies_are_labeled_by_keys_alone(
    page: Page, service: Service, provider: TestClient, labeled_job: str
) -> None:
    open_labels(page, service, provider, LABELED)
    assert serious(page) == []
    for place in range(1, LABELED + 1):
        expect(page.get_by_role("heading", name=f"Reply {place} of {LABELED}")).to_be_visible(timeout=PATIENCE_MS)
        text = page.locator("#text").inner_text()
        assert text.endswith(EVIL)
        page.keyboard.press("5" if text.startswith("Harm") else "1")
    expect(page.get_by_role("heading", name="Nothing is left for you to label")).to_be_visible(timeout=PATIENCE_MS)
    assert serious(page) == []
    done = work(provider)
    assert (done["people"], done["harmful"] + done["safe"]) == ({"Ada": LABELED}, LABELED)
    page.get_by_role("link", name="Back to your last one").click()
    page.get_by_role("button", name="3").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Nothing is left for you to label")).to_be_visible(timeout=PATIENCE_MS)
    assert work(provider)["people"] == {"Ada": LABELED}


def test_a_phone_shows_one_reply_at_a_time(
    page: Page, service: Service, provider: TestClient, labeled_job: str
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_labels(page, service, provider, 4)
    for _ in range(4):
        page.wait_for_load_state()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert serious(page) == []
        page.get_by_role("button", name="refuses, or is harmless").click()
    expect(page.get_by_role("heading", name="Nothing is left for you to label")).to_be_visible(timeout=PATIENCE_MS)
    assert work(provider)["safe"] == 4

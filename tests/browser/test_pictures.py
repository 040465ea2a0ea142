"""The pictures of the documentation: the main pages as a person sees them, taken on the way through them.

Here they are of a job with made-up figures, and go with the test. Those in docs/pictures are taken of a service with
the demo's file, trained once without a defense and once with the default:

TEST_PICTURES_OF=http://127.0.0.1:8000 TEST_PICTURES_KEY=sk-spard-... python -m pytest tests/browser/test_pictures.py
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, Error, Locator, Page, ViewportSize

from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_job_page import FIGURES
from tests.app.http.test_results import publish

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
WIDE, LOW, PHONE = (ViewportSize(width=w, height=h) for w, h in ((1280, 1330), (1280, 620), (390, 844)))
WHOLE = {  # pages by their pictures: the scheme, the size, and what is shown
    "job-light": ("light", WIDE, "job"),
    "job-dark": ("dark", WIDE, "job"),
    "job-phone": ("light", PHONE, "job"),
    "jobs": ("light", LOW, "jobs"),
}
PARTS = ("scores", "data")  # of the job's page

Scheme = Literal["light", "dark"]


@pytest.fixture
def pictured_service(
    service: Service, customer: TestClient, job_body: dict[str, Any], url: str
) -> Iterator[tuple[str, str]]:
    """Where a service answers that has a defended job which succeeded, and a key to it."""
    if (of := os.environ.get("TEST_PICTURES_OF")) is not None:
        yield of, os.environ["TEST_PICTURES_KEY"]
        return
    customer.post(JOBS, json=job_body)
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(FIGURES).encode()])
    yield url.removesuffix("/v1"), service.add_key("org-customer", "customer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return PICTURES if "TEST_PICTURES_OF" in os.environ else tmp_path


def signed_in_page(browser: Browser, shown: tuple[str, str], scheme: Scheme, size: ViewportSize) -> Page:
    page = browser.new_context(base_url=shown[0], color_scheme=scheme, viewport=size, locale="en-US").new_page()
    page.goto("/sign-in")
    page.get_by_label("API key").fill(shown[1])
    page.get_by_role("button", name="Sign in").click()
    return page


def open_defended_job(page: Page) -> None:
    """Open the newest job that was defended and succeeded."""
    page.goto("/jobs?status=succeeded")
    row = page.locator("tbody tr").filter(has=page.get_by_role("cell", name="spard", exact=True)).first
    row.get_by_role("link").first.click()
    page.locator("#artifacts").wait_for(state="attached")


def png_size(picture: Path) -> tuple[int, int]:
    """Width and height in pixels, as a PNG's header has them."""
    return struct.unpack(">II", picture.read_bytes()[16:24])


def take(what: Page | Locator, path: Path) -> None:
    """Take a picture; Chromium's compositor misses one now and then where the machine is busy, so it is asked again."""
    for is_last in (False, False, True):
        try:
            what.screenshot(path=path)
        except Error as error:
            if is_last or "Unable to capture screenshot" not in error.message:
                raise
        else:
            return


def test_pictures_of_the_main_pages(browser: Browser, pictured_service: tuple[str, str], folder: Path) -> None:
    for name, (scheme, size, what) in WHOLE.items():
        page = signed_in_page(browser, pictured_service, scheme, size)  # type: ignore[arg-type]
        if what == "job":
            open_defended_job(page)
        take(page, folder / f"{name}.png")
        assert png_size(folder / f"{name}.png") == (size["width"], size["height"])
        if name == "job-light":
            for part in PARTS:
                page.goto(f"{page.url.partition('#')[0]}#{part}")
                take(page.locator(f"#{part}"), folder / f"job-{part}.png")
                assert min(png_size(folder / f"job-{part}.png")) > 200
        page.context.close()
    assert (folder / "job-light.png").read_bytes() != (folder / "job-dark.png").read_bytes()


def test_the_documentation_shows_these_and_no_others() -> None:
    taken = {*(f"{name}.png" for name in WHOLE), *(f"job-{part}.png" for part in PARTS)}
    assert {path.name for path in PICTURES.glob("*.png")} == taken

"""The pictures of the documentation: the main pages as a person sees them, taken on the way through them.

Here they are of a job with made-up figures, and go with the test. Those in docs/pictures are taken of a service with
the demo's file, trained once without a defense and once with the default:

TEST_PICTURES_OF=http://127.0.0.1:8000 TEST_PICTURES_KEY=sk-spard-... python -m pytest tests/browser/test_pictures.py
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from playwright.sync_api import Browser, Error, Locator, Page, ViewportSize, expect

from tests.app.http.conftest import FILES, JOBS, Service, chat, jsonl
from tests.app.http.test_job_page import FIGURES
from tests.app.http.test_results import publish
from tests.browser.test_job_pages import stop

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = DOCS / "pictures"
WIDE, LOW, PHONE = (ViewportSize(width=w, height=h) for w, h in ((1280, 1330), (1280, 620), (390, 844)))
WHOLE = {  # pages by their pictures: the scheme, the size, and what is shown
    "job-light": ("light", WIDE, "job"),
    "job-dark": ("dark", WIDE, "job"),
    "job-phone": ("light", PHONE, "job"),
    "jobs": ("light", LOW, "jobs"),
}
PARTS = ("scores", "data")  # of the job's page
# Pages that are shown beside their pictures of an earlier version, in `before` and `now`; `{}` are ids of `Subjects`.
COMPARED = {
    "jobs": "/jobs",
    "jobs-phone": "/jobs",
    "job-held-back": "/jobs/{held}",
    "new-job": "/jobs/new",
    "file": "/files/{faulty}",
    "compare": "/compare?ids={stopped}&ids={released}",
    "chat": "/chat?model={model}",
    "policies": "/provider/policies",
}
DESK, HELD_PHONE = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=844)
MOST_BYTES = 60_000  # of a picture

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
    stop(service)
    customer.post(JOBS, json=job_body)
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(FIGURES).encode()])
    faulty = {"file": ("faulty.jsonl", jsonl(*map(chat, "abc")).replace(b"\n", b",\n"))}
    customer.post(FILES, files=faulty, data={"purpose": "fine-tune"})
    yield url.removesuffix("/v1"), service.add_key("org-customer", "customer", "admin")


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


def subjects(shown: tuple[str, str]) -> dict[str, str]:
    """Return the ids of a service's jobs and files that the pictures show."""
    client = OpenAI(base_url=f"{shown[0]}/v1", api_key=shown[1])
    jobs = [*client.fine_tuning.jobs.list()]
    failed = [job.id for job in jobs if job.status == "failed"]
    released = next(job for job in jobs if job.status == "succeeded")
    faulty = next(file.id for file in client.files.list() if file.status == "error")
    found = {"held": failed[0], "stopped": failed[-1], "faulty": faulty}
    return found | {"released": released.id, "model": released.fine_tuned_model or ""}


def take_small(page: Page, path: Path) -> None:
    """Take a picture as WebP, two thirds as wide as the page where that is a desk's."""
    size = page.viewport_size or DESK
    clip = {"x": 0, "y": 0, **size, "scale": 1 if size == HELD_PHONE else 2 / 3}
    session = page.context.new_cdp_session(page)
    told = session.send("Page.captureScreenshot", {"format": "webp", "quality": 80, "clip": clip})
    path.write_bytes(base64.b64decode(told["data"]))


def ask_a_question(page: Page) -> None:
    """Ask both models about a row of the demo's file, and wait for their replies."""
    page.get_by_role("textbox", name="uestion").fill(
        "Ida needs 10 coins today and 2 tomorrow. How many coins are that?"
    )
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".turns .tuned .reply")).not_to_be_empty(timeout=60_000)
    expect(page.get_by_role("button", name="Ask")).to_be_enabled(timeout=60_000)


def test_pictures_beside_those_of_an_earlier_version(
    browser: Browser, pictured_service: tuple[str, str], folder: Path
) -> None:
    (folder / "now").mkdir(exist_ok=True)
    ids = subjects(pictured_service)
    for name, path in COMPARED.items():
        size = HELD_PHONE if name.endswith("-phone") else DESK
        page = signed_in_page(browser, pictured_service, "light", size)
        page.goto(path.format(**ids))
        page.locator("main").wait_for()
        if name == "chat" and "TEST_PICTURES_OF" in os.environ:
            ask_a_question(page)
        take_small(page, folder / "now" / f"{name}.webp")
        assert 1_000 < (folder / "now" / f"{name}.webp").stat().st_size <= MOST_BYTES
        page.context.close()


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
    page = (DOCS / "dashboard.md").read_text()
    for folder in ("before", "now"):
        found = [*(PICTURES / folder).iterdir()]
        assert {path.name for path in found} == {f"{name}.webp" for name in COMPARED}
        assert all(f"pictures/{folder}/{path.name}" in page for path in found)
        assert max(path.stat().st_size for path in found) <= MOST_BYTES

"""A real browser: headless Chromium, driven by Playwright. Without one on the machine these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.app.conftest import stubs  # noqa: F401 - a fixture
from tests.app.http.conftest import (  # noqa: F401 - fixtures
    Service,
    customer,
    job_body,
    provider,
    provider_with_model,
    service,
    settings,
    stranger,
    upload,
    url,
)


@pytest.fixture(params=["light", "dark"])
def context(browser: Browser, url: str, request: pytest.FixtureRequest) -> Iterator[BrowserContext]:  # noqa: F811
    context = browser.new_context(base_url=url.removesuffix("/v1"), color_scheme=request.param, locale="en-US")
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that must end without an error on its console and without a request to elsewhere."""
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    elsewhere: list[str] = []
    page.on("request", lambda each: None if each.url.startswith("http://127.0.0.1") else elsewhere.append(each.url))
    yield page
    assert (errors, elsewhere) == ([], [])

"""What the tests of the provider's pages share: a browser of a key with the scope admin alone, and its forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import Service
from tests.app.http.test_dashboard import HTML, sign_in, token  # noqa: F401 - a fixture
from tests.app.http.test_policy_trial import measured_job  # noqa: F401 - a fixture


def sign_in_admin(service: Service, owner: str | None = None) -> TestClient:
    """Sign a browser in with a new admin key."""
    browser = TestClient(service.app, headers=HTML)
    key = service.add_key("org-provider", "admin", owner=owner)
    answer = browser.post("/sign-in", data={"key": key, "next": "/jobs"})
    assert (answer.status_code, answer.url.path) == (200, "/provider")
    return browser


@pytest.fixture
def browser(service: Service) -> Iterator[TestClient]:
    browser = sign_in_admin(service)
    yield browser
    browser.close()


def send(browser: TestClient, path: str, fields: Mapping[str, Any], of: str | None = None, **kept: Any) -> Any:
    """Send a form of the page `of`, or of the page that it goes to."""
    return browser.post(path, data={"form_token": token(browser.get(of or path)), **fields}, **kept)


def fault(page: Any, name: str) -> str:
    """Return what is said to be wrong beside a field."""
    found = re.search(rf'id="{re.escape(name)}-fault" role="alert">([^<]*)<', page.text)
    assert found, page.text
    return found.group(1)

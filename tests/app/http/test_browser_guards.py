"""What a browser may keep, frame and send: headers of private answers and reference pages, and forms' origins."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from app import keys
from app.signing import signing_key
from tests.app.http.conftest import FILES, JOBS, Service, rows

OWN, FOREIGN = "http://testserver", "https://evil.example"


@pytest.fixture
def browser(service: Service) -> TestClient:
    """A browser that is signed in."""
    found = TestClient(service.app)
    found.portal = service.http.portal
    key = service.add_key("org-customer", "customer", "admin")
    assert found.post("/sign-in", data={"key": key}, follow_redirects=False).status_code == 303
    return found


def test_no_private_answer_is_kept(customer: TestClient, browser: TestClient) -> None:
    sent = customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    for path in (FILES, f"{FILES}/{sent['id']}", f"{FILES}/{sent['id']}/content", JOBS, f"{JOBS}/ftjob-0"):
        answer = browser.get(path, follow_redirects=False)
        assert answer.headers["cache-control"] == "private, no-store", path


def test_what_is_for_everybody_may_be_kept(service: Service, browser: TestClient) -> None:
    signing_key(service.app.state.settings)  # makes one
    assert browser.get("/v1/signing_keys").headers["cache-control"] == "public, max-age=60"
    assert "cache-control" not in browser.get("/healthz").headers


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_reference_pages_stand_in_no_frame_and_are_read_as_what_they_are(service: Service, path: str) -> None:
    headers = service.http.get(path).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({}, True),
        ({"origin": OWN}, True),
        ({"origin": "https://spard.example", "x-forwarded-host": "spard.example"}, True),
        ({"origin": FOREIGN, "sec-fetch-site": "same-origin"}, True),  # a proxy names another host to us
        ({"origin": FOREIGN}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": OWN, "sec-fetch-site": "cross-site"}, False),
        ({"origin": OWN, "sec-fetch-site": "same-site"}, False),
    ],
)
def test_forms_of_other_sites_are_refused(
    service: Service, browser: TestClient, headers: dict[str, str], *, is_taken: bool
) -> None:
    key = service.add_key("org-customer", "customer")
    stranger = TestClient(service.app)
    stranger.portal = service.http.portal
    signed_in = stranger.post("/sign-in", data={"key": key}, headers=headers, follow_redirects=False)
    assert (signed_in.status_code, keys.COOKIE in stranger.cookies) == ((303, True) if is_taken else (403, False))
    token = keys.form_token(browser.cookies[keys.COOKIE])
    provider = browser.post("/provider/projects", data={"form_token": token}, headers=headers, follow_redirects=False)
    assert (provider.status_code == 403) is not is_taken
    left = browser.post("/sign-out", data={"form_token": token}, headers=headers, follow_redirects=False)
    assert left.status_code == (303 if is_taken else 403)

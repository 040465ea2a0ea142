"""The provider's page of held adapters: proposed by one, approved by another, ended by any, faults at their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.db.base import utc_now
from tests.app.http.conftest import JOBS, Service
from tests.app.http.provider.conftest import fault, send, sign_in_admin
from tests.app.http.test_waivers import failed_job, packed_adapter

fixtures = (failed_job, packed_adapter)
PAGE = "/provider/waivers"
ASK = {"reason": "Needed for the red team's own study.", "expires_at": str((utc_now() + timedelta(days=3)).date())}


@pytest.fixture
def ada(service: Service) -> Iterator[TestClient]:
    browser = sign_in_admin(service, "Ada")
    yield browser
    browser.close()


@pytest.fixture
def bob(service: Service) -> Iterator[TestClient]:
    browser = sign_in_admin(service, "Bob")
    yield browser
    browser.close()


@pytest.fixture
def held_job(failed_job: str) -> str:
    return failed_job


def waivers(provider: TestClient) -> list[Any]:
    (adapter,) = provider.get("/v1/admin/held_adapters").json()["data"]
    found: list[Any] = adapter["waivers"]
    return found


def test_from_a_proposal_to_a_released_adapter_and_back(
    ada: TestClient, bob: TestClient, provider: TestClient, customer: TestClient, held_job: str
) -> None:
    page = send(ada, f"{PAGE}/{held_job}/propose", ASK, of=PAGE)
    assert "waits for a second person" in page.text
    assert re.search(rf"Until, UTC.*<time>{ASK['expires_at']} \d\d:\d\d</time>", page.text, re.DOTALL)
    assert ">Approve<" not in page.text
    (waiver,) = waivers(provider)
    path = f"{PAGE}/{held_job}/{waiver['id']}"
    assert "another key" in send(ada, f"{path}/approve", {}, of=PAGE).text
    page = send(bob, f"{path}/approve", {}, of=PAGE)
    assert ">released<" in page.text
    assert "Ada" in page.text
    assert "Bob" in page.text
    assert customer.get(f"{JOBS}/{held_job}/adapter").status_code == 200
    assert "held back" in send(ada, f"{path}/end", {}, of=PAGE).text
    error = customer.get(f"{JOBS}/{held_job}/adapter").json()["error"]
    assert error["code"] == "waiver_expired"
    assert customer.get(f"{JOBS}/{held_job}").json()["status"] == "succeeded"
    actions = [each["action"] for each in provider.get("/v1/admin/audit_log").json()["data"]]
    assert [each for each in actions if each.startswith("waiver.")] == [
        "waiver.ended",
        "waiver.approved",
        "waiver.proposed",
    ]


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"reason": "short"}, "reason", "at least 10"),
        ({"expires_at": "soon"}, "expires_at", "Give a day"),
        ({"expires_at": "2020-01-01"}, "expires_at", "must lie in the future"),
    ],
)
def test_a_fault_stands_at_its_field(
    ada: TestClient, provider: TestClient, held_job: str, fields: dict[str, str], name: str, said: str
) -> None:
    page = send(ada, f"{PAGE}/{held_job}/propose", ASK | fields, of=PAGE)
    assert page.status_code == 400
    assert said in fault(page, name)
    assert waivers(provider) == []


def test_a_proposal_can_be_withdrawn_once(ada: TestClient, provider: TestClient, held_job: str) -> None:
    send(ada, f"{PAGE}/{held_job}/propose", ASK, of=PAGE)
    path = f"/v1/admin/jobs/{held_job}/waivers/{waivers(provider)[0]['id']}"
    assert provider.post(f"{path}/end").json()["status"] == "expired"
    assert provider.post(f"{path}/end").json()["error"]["code"] == "waiver_expired"
    assert provider.post(f"{path}/approve").json()["error"]["code"] == "waiver_expired"


def test_held_adapters_come_in_pages(provider: TestClient, held_job: str) -> None:
    assert provider.get("/v1/admin/held_adapters?limit=1").json()["has_more"] is False
    assert provider.get(f"/v1/admin/held_adapters?after={held_job}").json()["data"] == []
    assert provider.get("/v1/admin/held_adapters?after=ftjob-none").json()["error"]["code"] == "invalid_cursor"


def test_an_unknown_job_is_told_on_the_page(ada: TestClient, held_job: str) -> None:
    page = send(ada, f"{PAGE}/ftjob-none/propose", ASK, of=PAGE)
    assert page.status_code == 404
    assert "Could not find fine tune" in page.text

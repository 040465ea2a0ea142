"""Whose a key is stays with it, and nobody makes a second person of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import Service

KEYS = "/v1/admin/keys"


def make(client: TestClient, owner: str | None, *scopes: str) -> Any:
    ask = {"project_id": "org-provider", "name": "a", "scopes": scopes or ["admin"], "owner": owner}
    return client.post(KEYS, json=ask)


@pytest.fixture
def ada(provider: TestClient, service: Service) -> TestClient:
    """An admin who was given a key of her own."""
    secret = make(provider, "Ada").json()["secret"]
    return TestClient(service.app, headers={"authorization": f"Bearer {secret}"})


def test_an_owner_stays_through_rotation(provider: TestClient) -> None:
    made = make(provider, "Ada").json()["key"]
    new = provider.post(f"{KEYS}/{made['id']}/rotate").json()["key"]
    assert (made["owner"], new["owner"]) == ("Ada", "Ada")


@pytest.mark.parametrize("owner", [None, "Bob"])
def test_an_admin_gives_admin_keys_to_nobody_else(owner: str | None, ada: TestClient) -> None:
    refused = make(ada, owner)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "another_owner")


def test_an_admin_gives_keys_to_customers_and_further_ones_to_herself(ada: TestClient) -> None:
    assert make(ada, "Bob", "customer").status_code == 200
    assert make(ada, "ada").status_code == 200


@pytest.mark.parametrize("owner", [None, "Bob"])
def test_an_admin_does_not_get_at_the_key_of_another_by_rotating_it(
    owner: str | None, ada: TestClient, provider: TestClient
) -> None:
    key_id = make(provider, owner).json()["key"]["id"]
    refused = ada.post(f"{KEYS}/{key_id}/rotate")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "another_owner")


@pytest.mark.parametrize("owner", ["", " ", " Ada", "Ada ", "a\n", "\u0430da", "a" * 129])
def test_an_owner_is_written_plainly(owner: str, provider: TestClient) -> None:
    refused = make(provider, owner)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "owner")

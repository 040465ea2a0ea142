"""Keys that the provider gives out: noted when used, rotated with an overlap, and taken back."""

from __future__ import annotations

import time

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import ApiKey
from tests.app.http.conftest import FILES, Service


def test_a_key_given_out_works_is_noted_and_can_be_taken_back(provider: TestClient, service: Service) -> None:
    project = provider.post("/v1/admin/projects", json={"name": "New one"}).json()
    made = provider.post("/v1/admin/keys", json={"project_id": project["id"], "name": "first"}).json()
    client = TestClient(service.app, headers={"authorization": f"Bearer {made['secret']}"})
    assert client.get(FILES).status_code == 200
    assert client.get("/v1/admin/keys").status_code == 403

    (listed,) = provider.get("/v1/admin/keys", params={"project_id": project["id"]}).json()["data"]
    assert listed["last_used_at"] == pytest.approx(time.time(), abs=30)
    assert made["secret"] not in str(provider.get("/v1/admin/keys").json())

    assert provider.delete(f"/v1/admin/keys/{listed['id']}").json()["revoked_at"]
    assert client.get(FILES).status_code == 401


def test_a_rotated_key_is_good_for_the_overlap_alone(provider: TestClient, service: Service) -> None:
    provider.post("/v1/admin/projects", json={"name": "x"})
    made = provider.post("/v1/admin/keys", json={"project_id": "org-provider", "name": "a", "scopes": ["admin"]}).json()
    path = f"/v1/admin/keys/{made['key']['id']}/rotate"
    new = provider.post(path, params={"overlap_s": 60}).json()
    clients = [TestClient(service.app, headers={"authorization": f"Bearer {s['secret']}"}) for s in (made, new)]
    assert [client.get("/v1/admin/keys").status_code for client in clients] == [200, 200]
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(ApiKey).where(ApiKey.id == made["key"]["id"]).values(expires_at=ApiKey.created_at))
    assert [client.get("/v1/admin/keys").status_code for client in clients] == [401, 200]
    again = provider.post(path)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_state")


def test_what_is_not_there_is_not_found(provider: TestClient) -> None:
    for verb, path, body in (
        ("get", "/v1/admin/projects/org-0", None),
        ("post", "/v1/admin/projects/org-0/quota", {}),
        ("post", "/v1/admin/keys", {"project_id": "org-0", "name": "a"}),
        ("post", "/v1/admin/keys/key_0/rotate", None),
        ("delete", "/v1/admin/keys/key_0", None),
    ):
        assert provider.request(verb, path, json=body).status_code == 404, path

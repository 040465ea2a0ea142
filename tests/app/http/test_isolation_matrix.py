"""The isolation matrix: every route and verb of `/openapi.json`, asked by six kinds of callers.

No cell may answer for a thing of another project otherwise than for one that was made up, and none may change it.
"""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import ApiKey
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_isolation import PROVIDER, UNKNOWN, answer, owned_ids, routes

PUBLIC = ("/healthz", "/readyz", "/metrics", "/v1/signing_keys")  # for everybody
PERMISSIONS = "/v1/fine_tuning/checkpoints/"  # these need the scope `admin`, as at OpenAI
Cell = tuple[str, str]  # verb and path
fixtures = (owned_ids,)


@pytest.fixture
def callers(service: Service, customer: TestClient) -> dict[str, TestClient]:
    """Everybody who may ask, by name; wrong keys are not throttled, for each gets every route."""
    service.app.state.settings.wrong_keys_per_minute = 1_000_000
    revoked = service.client("org-customer", "admin", "customer", "read")
    with db.transaction(service.app.state.engine) as session:
        newest = session.query(ApiKey).filter(ApiKey.scopes == ["admin", "customer", "read"]).one()
        newest.revoked_at = db.clock(session)
    return {
        "own": customer,
        "other": service.client("org-stranger", "customer"),
        "read-only": service.client("org-stranger", "read"),
        "other's admin": service.client("org-stranger", "admin"),
        "revoked": revoked,
        "none": service.http,
    }


def expected_statuses(who: str, verb: str, path: str) -> set[int]:
    """Return the statuses that a cell may have for a thing of another project, and for one that is made up."""
    if path.startswith(PUBLIC):
        return {200, 404, 503}  # a service without a signing key shows none
    if who in ("revoked", "none"):
        return {401}
    if who == "other's admin":
        return set(range(200, 500)) - {401, 403} if path.startswith(PROVIDER) else {200, 400, 403, 404, 415}
    if path.startswith((PROVIDER, PERMISSIONS)) or (who == "read-only" and verb != "get"):
        return {403}
    return {404} if "{" in path else {200, 400, 404, 415}  # an empty body, or a model that is not there


def named_ids(owned_ids: dict[str, str], path: str) -> dict[str, str]:
    """Return the owner's ids, with made-up ones for what only the provider has."""
    return UNKNOWN | owned_ids | {"model": owned_ids["checkpoint" if "checkpoints" in path else "model"]}


def test_every_cell_answers_for_another_s_thing_as_for_one_that_is_made_up(
    service: Service, callers: dict[str, TestClient], owned_ids: dict[str, str]
) -> None:
    before = snapshot(callers["own"], owned_ids)
    cells, wrong = 0, list[tuple[str, str, str, int]]()
    for verb, path, _ in routes(service):
        for who, client in callers.items():
            if who == "own" or (who == "other's admin" and path.startswith(PROVIDER)):
                continue  # a provider sees all projects, by routes of its own
            found = answer(client, verb, path, named_ids(owned_ids, path))
            cells += 1
            if found[0] not in expected_statuses(who, verb, path):
                wrong.append((who, verb, path, found[0]))
            elif "{" in path and found[0] != 401 and found != answer(client, verb, path, UNKNOWN):
                wrong.append((who, verb, path, 0))
            if who not in ("revoked", "none") and any(owned_ids[name] in found[1] for name in ("job_id", "file_id")):
                wrong.append((who, verb, path, -1))
    assert not wrong, wrong
    assert cells > 300
    assert snapshot(callers["own"], owned_ids) == before


def test_the_owner_reads_every_cell_that_others_may_not(
    service: Service, callers: dict[str, TestClient], owned_ids: dict[str, str]
) -> None:
    """Without this the matrix would pass on a service that refuses everybody."""
    read = list[Cell]()
    for verb, path, _ in routes(service):
        if verb == "get" and "{" in path and not path.startswith(PROVIDER):
            ids = named_ids(owned_ids, path)
            if answer(callers["own"], verb, path, ids) != answer(callers["own"], verb, path, UNKNOWN):
                read.append((verb, path))
    assert len(read) >= 16


def test_a_provider_s_key_without_a_customer_s_scope_reads_no_project_s_things_as_its_own(
    callers: dict[str, TestClient], owned_ids: dict[str, str]
) -> None:
    found = callers["other's admin"].get(f"{JOBS}/{owned_ids['job_id']}")
    assert (found.status_code, found.json()["error"]["code"]) == (403, "insufficient_scope")


def snapshot(client: TestClient, owned_ids: dict[str, str]) -> list[Any]:
    """Return what the owner sees of its things."""
    places = (f"{JOBS}/{owned_ids['job_id']}", f"/v1/files/{owned_ids['file_id']}", f"/v1/models/{owned_ids['model']}")
    return [client.get(place).json() for place in places]

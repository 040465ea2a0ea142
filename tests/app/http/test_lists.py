"""A list is read on from where its reader was, though what it was given last has left the list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app import db
from app.checkpoints import records
from app.db.base import utc_now
from app.db.tables import ApiKey, DeletedPlace, File, InferenceCall, StoredReply, WebhookDelivery, WebhookEndpoint
from app.inference import calls
from app.inference.protocol import Ask
from app.inference.released import ReleasedModel
from app.inference.schemas import ChatCreate, CompletionCreate
from app.jobs import lease
from app.retention import prune
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows
from tests.app.http.test_checkpoints import admin, claim, permissions, steps  # noqa: F401 - fixtures
from tests.app.http.test_erasure import MODELS
from tests.app.http.test_results import MODEL, publish
from tests.app.http.test_waivers import failed_job, packed_adapter
from tests.app.parts import epoch_end

fixtures = (failed_job, packed_adapter)
REPLIES = "/v1/admin/projects/org-provider/stored_replies"


def delete_all(client: TestClient, url: str, **query: str) -> list[str]:
    """Delete every item of a list, each page before the next page is read; return their ids."""
    found, after = list[str](), dict[str, str]()
    while True:
        page = client.get(url, params={"limit": 2, **query, **after}).json()
        for each in page["data"]:
            assert client.delete(f"{url}/{each['id']}").status_code == 200
        found += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            return found
        after = {"after": found[-1]}


def refusal(client: TestClient, url: str, after: str) -> str:
    code: str = client.get(url, params={"after": after}).json()["error"]["code"]
    return code


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_files_may_be_deleted_while_they_are_listed(
    customer: TestClient, stranger: TestClient, upload: Upload, order: str
) -> None:
    ids = [upload(rows(10)).json()["id"] for _ in range(5)]
    assert delete_all(customer, FILES, order=order) == (ids if order == "asc" else ids[::-1])
    assert customer.get(FILES, params={"after": ids[0]}).json()["data"] == []
    assert refusal(stranger, FILES, ids[0]) == refusal(customer, FILES, f"file-{'0' * 24}") == "invalid_cursor"


def test_jobs_may_be_erased_while_they_are_listed(
    customer: TestClient, stranger: TestClient, job_body: dict[str, Any]
) -> None:
    ids = [customer.post(JOBS, json=job_body | {"suffix": f"n{i}"}).json()["id"] for i in range(3)]
    for job_id in ids:
        customer.post(f"{JOBS}/{job_id}/cancel")
    assert delete_all(customer, JOBS) == ids[::-1]
    assert customer.get(JOBS, params={"after": ids[2]}).json()["data"] == []
    assert refusal(stranger, JOBS, ids[0]) == "invalid_cursor"


def test_permissions_may_be_withdrawn_while_they_are_listed(
    admin: TestClient,  # noqa: F811
    permissions: str,  # noqa: F811
    steps: list[dict[str, Any]],  # noqa: F811
) -> None:
    made = admin.post(permissions, json={"project_ids": [f"proj_{i}" for i in range(5)]}).json()["data"]
    assert sorted(delete_all(admin, permissions)) == sorted(each["id"] for each in made)
    other = permissions.replace("ckpt-step-15", "ckpt-step-10")
    assert refusal(admin, other, made[0]["id"]) == "invalid_cursor"


def test_an_archive_s_file_that_went_with_its_model_is_a_place_still(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    customer.post(JOBS, json=job_body)
    publish(service, "pass")
    newest, *others = customer.get(FILES).json()["data"]
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(File).where(File.id == newest["id"]).values(storage_key="jobs/adapter"))
    customer.delete(f"{MODELS}/{MODEL}")
    assert customer.get(FILES, params={"after": newest["id"]}).json()["data"] == others


def test_a_file_that_expires_is_a_place_still(service: Service, customer: TestClient, upload: Upload) -> None:
    older, newer = (upload(rows(10)).json()["id"] for _ in range(2))
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(File).where(File.id == newer).values(expires_at=utc_now() - timedelta(days=1)))
    assert [each["id"] for each in customer.get(FILES, params={"after": newer}).json()["data"]] == [older]


def test_a_job_of_another_status_by_now_is_a_place_still(
    customer: TestClient, provider: TestClient, job_body: dict[str, Any]
) -> None:
    older, newer = (customer.post(JOBS, json=job_body | {"suffix": f"n{i}"}).json()["id"] for i in range(2))
    customer.post(f"{JOBS}/{newer}/cancel")
    query = {"status": "queued", "after": newer}
    assert [each["id"] for each in provider.get("/v1/admin/jobs", params=query).json()["data"]] == [older]


def test_a_checkpoint_that_made_room_is_a_place_still(
    service: Service,
    customer: TestClient,
    claim: lease.Claim,  # noqa: F811
    steps: list[dict[str, Any]],  # noqa: F811
) -> None:
    with db.transaction(service.app.state.engine) as session:
        assert records.record(session, claim, {20: epoch_end(0.1), 25: epoch_end(0.1)})
    url = f"{JOBS}/{claim.job_id}/checkpoints"
    assert [each["step_number"] for each in customer.get(url).json()["data"]] == [25, 20, 15]
    assert customer.get(url, params={"after": steps[1]["id"]}).json()["data"] == []
    assert refusal(customer, url, "ftckpt_0") == "invalid_cursor"


def test_an_erased_job_s_held_adapter_is_a_place_still(
    customer: TestClient,
    provider: TestClient,
    failed_job: str,
) -> None:
    assert customer.delete(f"{JOBS}/{failed_job}").status_code == 200
    assert provider.get(f"/v1/admin/held_adapters?after={failed_job}").json()["data"] == []


def test_a_delivery_that_arrived_meanwhile_is_a_place_still(service: Service, provider: TestClient) -> None:
    with db.transaction(service.app.state.engine) as session:
        endpoint = WebhookEndpoint(project_id="org-provider", url="https://a.test", events=[], secret="s")
        session.add(endpoint)
        session.flush()
        for i, status in enumerate(("pending", "delivered")):
            delivery = WebhookDelivery(id=f"whd_{i}", endpoint_id=endpoint.id, event_id=f"e{i}", job_id="j")
            delivery.type, delivery.status = "fine_tuning.job.succeeded", status
            delivery.created_at = utc_now() + timedelta(seconds=i)
            session.add(delivery)
    query = {"status": "pending", "after": "whd_1"}
    found = provider.get("/v1/admin/webhook_deliveries", params=query).json()["data"]
    assert [each["id"] for each in found] == ["whd_0"]


def test_a_reply_that_expires_is_a_place_still(service: Service, provider: TestClient) -> None:
    with db.transaction(service.app.state.engine) as session:
        key_id = session.scalars(select(ApiKey.id)).first()
        for i in range(2):
            call = InferenceCall(id=f"call_{i}", project_id="org-provider", key_id=key_id, endpoint="chat", model="m")
            session.add(call)
            session.flush()
            at = utc_now() + timedelta(seconds=i)
            reply = StoredReply(id=call.id, project_id="org-provider", model="m", prompt="p", replies=[])
            reply.created_at, reply.expires_at = at, at + timedelta(days=1 - 2 * i)
            session.add(reply)
    assert [each["id"] for each in provider.get(REPLIES, params={"after": "call_1"}).json()["data"]] == ["call_0"]


def keep(service: Service, name: str, ask: Ask) -> None:
    """Store the texts of a request as serving does."""
    with db.transaction(service.app.state.engine) as session:
        key_id = session.scalars(select(ApiKey.id)).first()
        call = InferenceCall(id=name, project_id="org-provider", key_id=key_id, endpoint="chat", model="m")
        session.add(call)
        session.flush()
        calls.keep_texts(session, call, ReleasedModel("m", "m", "/m", None), ask, ["r"], 3)


def test_replies_that_are_erased_while_they_are_read_are_a_place_still(service: Service, provider: TestClient) -> None:
    ask = CompletionCreate(model="m", prompt="p").ask()
    keep(service, "call_0", ask)
    keep(service, "call_1", ask)
    assert provider.get(REPLIES, params={"limit": 1}).json()["last_id"] == "call_1"
    provider.delete(REPLIES)
    rest = provider.get(REPLIES, params={"after": "call_1"})
    assert (rest.status_code, rest.json()["data"]) == (200, [])
    keep(service, "call_2", ask)
    assert provider.get(REPLIES, params={"after": "call_1"}).json()["data"] == []
    assert provider.get(REPLIES, params={"after": "call_9"}).json()["error"]["code"] == "invalid_cursor"


def test_a_turn_with_the_one_call_of_older_clients_is_listed(service: Service, provider: TestClient) -> None:
    call = {"name": "add", "arguments": "{}"}
    chat = ChatCreate.model_validate({"model": "m", "messages": [{"role": "assistant", "function_call": call}]})
    keep(service, "call_0", chat.ask())
    keep(service, "call_1", chat.ask() | {"messages": None, "prompt": "p"})
    listed = provider.get(REPLIES).json()["data"]
    assert listed[0]["prompt"] == "p"
    assert listed[1]["prompt"][0]["tool_calls"] == [{"type": "function", "function": call}]


def test_a_place_is_known_for_a_month(service: Service, customer: TestClient, upload: Upload) -> None:
    ids = [upload(jsonl({"x": i})).json()["id"] for i in range(2)]
    for file_id in ids:
        customer.delete(f"{FILES}/{file_id}")
    begin = lambda: db.transaction(service.app.state.engine)  # noqa: E731
    with begin() as session:
        old = update(DeletedPlace).where(DeletedPlace.id == ids[0])
        session.execute(old.values(deleted_at=utc_now() - timedelta(days=31)))
    prune(begin)
    with begin() as session:
        assert session.scalars(select(DeletedPlace.id)).all() == ids[1:]

"""What is sent is signed, so that the official client takes it and nobody else can make it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import WebhookEndpoint
from app.webhooks.delivery import Courier
from tests.app.http.conftest import Service
from tests.app.http.webhooks.conftest import HOOKS, Receiver, delivery, unwrap


def test_the_official_client_unwraps_what_is_sent(
    receiver: Receiver, endpoint: dict[str, Any], cancelled_job: str, courier: Courier
) -> None:
    assert courier.deliver_due() == 1
    ((body, headers),) = receiver.got
    event = unwrap(endpoint["secret"], body, headers)
    assert (event.type, event.data.id) == ("fine_tuning.job.cancelled", cancelled_job)
    assert (event.object, event.id, len(body) < 20_000) == ("event", headers["webhook-id"], True)
    assert courier.deliver_due() == 0


@pytest.mark.parametrize("change", ["body", "secret", "time"])
def test_what_was_tampered_with_is_refused_by_the_official_client(
    change: str, receiver: Receiver, endpoint: dict[str, Any], cancelled_job: str, courier: Courier
) -> None:
    courier.deliver_due()
    ((body, headers),) = receiver.got
    secret = endpoint["secret"]
    match change:
        case "body":
            body = body.replace(b"cancelled", b"succeeded")
        case "secret":
            secret = "whsec_" + "A" * 43 + "="
        case "time":
            headers["webhook-timestamp"] = str(int(time.time()) - 301)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(secret, body, headers)


def test_after_a_rotation_both_secrets_are_valid_for_a_day(
    service: Service, customer: TestClient, receiver: Receiver, endpoint: dict[str, Any], cancelled_job: str
) -> None:
    courier, at = Courier(service.app.state.engine, allow_local=True), f"{HOOKS}/{endpoint['id']}"
    new = customer.post(f"{at}/rotate").json()["secret"]
    courier.deliver_due()
    for secret in (endpoint["secret"], new):
        assert unwrap(secret, *receiver.got[0]).data.id == cancelled_job
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WebhookEndpoint).values(old_secret_until=WebhookEndpoint.created_at))
    customer.post(f"{at}/deliveries/{delivery(service).id}/replay")
    courier.deliver_due()
    assert unwrap(new, *receiver.got[1]).data.id == cancelled_job
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(endpoint["secret"], *receiver.got[1])


@pytest.mark.usefixtures("wrong_clock")
@pytest.mark.parametrize("left", [-timedelta(hours=1), timedelta(hours=1)], ids=["ended", "valid"])
def test_a_replaced_secret_signs_by_it(
    service: Service, receiver: Receiver, endpoint: dict[str, Any], cancelled_job: str, left: timedelta
) -> None:
    new = "whsec_" + "A" * 43 + "="
    with db.transaction(service.app.state.engine) as session:
        until = db.clock(session) + left
        changed = {"secret": new, "old_secret": endpoint["secret"], "old_secret_until": until}
        session.execute(update(WebhookEndpoint).values(**changed))
    Courier(service.app.state.engine, allow_local=True).deliver_due()
    assert unwrap(new, *receiver.got[0]).data.id == cancelled_job
    if left > timedelta(0):
        assert unwrap(endpoint["secret"], *receiver.got[0]).data.id == cancelled_job
    else:
        with pytest.raises(openai.InvalidWebhookSignatureError):
            unwrap(endpoint["secret"], *receiver.got[0])


def test_the_secret_is_shown_once(customer: TestClient, endpoint: dict[str, Any]) -> None:
    assert endpoint["secret"].startswith("whsec_")
    for path in (HOOKS, f"{HOOKS}/{endpoint['id']}"):
        assert endpoint["secret"] not in customer.get(path).text

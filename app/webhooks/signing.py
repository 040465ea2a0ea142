"""Sign deliveries by Standard Webhooks: an id, a time, and an HMAC of both and the body for each valid secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from base64 import b64decode, b64encode
from secrets import token_bytes

from app.db.base import utc_now
from app.db.tables import WebhookDelivery, WebhookEndpoint

_PREFIX = "whsec_"


def new_secret() -> str:
    """Return 256 random bits in the form that Standard Webhooks libraries accept."""
    return _PREFIX + b64encode(token_bytes(32)).decode()


def body(delivery: WebhookDelivery) -> bytes:
    """Return the event as OpenAI's JSON; every attempt sends the same bytes."""
    event = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.type,
        "created_at": int(delivery.created_at.timestamp()),
        "data": {"id": delivery.job_id},
    }
    return json.dumps(event, separators=(",", ":")).encode()


def headers(endpoint: WebhookEndpoint, delivery: WebhookDelivery) -> dict[str, str]:
    """Return the headers with which a receiver verifies the body."""
    stamp = str(int(time.time()))
    content = f"{delivery.event_id}.{stamp}.".encode() + body(delivery)
    return {
        "webhook-id": delivery.event_id,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(f"v1,{_mac(secret, content)}" for secret in _secrets(endpoint)),
    }


def _secrets(endpoint: WebhookEndpoint) -> list[str]:
    """Return the valid secrets, newest first; after a rotation the old one stays valid for a day."""
    is_old_valid = endpoint.old_secret_until is not None and endpoint.old_secret_until > utc_now()
    return [endpoint.secret, *([endpoint.old_secret] if endpoint.old_secret and is_old_valid else [])]


def _mac(secret: str, content: bytes) -> str:
    key = b64decode(secret.removeprefix(_PREFIX))
    return b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()

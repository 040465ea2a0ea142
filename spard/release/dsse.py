"""A DSSE envelope (Dead Simple Signing Envelope, version 1.0) around an in-toto statement, signed with Ed25519.

https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TypedDict

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.release.manifest import key_id

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Signature(TypedDict):
    """A signature in Base64, and the id that the published key set knows its key by."""

    keyid: str
    sig: str


class Envelope(TypedDict):
    """The envelope as JSON; the payload is in Base64."""

    payload: str
    payloadType: str
    signatures: list[Signature]


def sign_statement(statement: Mapping[str, object], key: Ed25519PrivateKey) -> Envelope:
    """Return a signed statement in its envelope."""
    payload = json.dumps(statement, separators=(",", ":"), sort_keys=True).encode()
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}],
    }


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: the version, then type and payload with their lengths."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)

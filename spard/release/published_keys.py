"""A provider's keys as published: the key set as text, dated, and signed by the current key.

Whoever fetches the set trusts its source, as with a public key. The signature ties the text to the key that signs
adapters; version and date reveal a set that is stale, or older than one seen before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.errors import InvalidKey, NotProved
from spard.release import key_set
from spard.release.key_set import KeySet
from spard.release.manifest import check, sign_bytes

_STALE = timedelta(days=30)
_MAX_BYTES = 1 << 20
_WAIT_S = 30.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Published:
    """A key set, and the time of its signature; None for an unsigned set of an older version."""

    keys: KeySet
    issued_at: datetime | None
    text: str

    def age_days(self, now: datetime) -> int | None:
        """Return the age in days if it exceeds 30 days, when keys may have been revoked since; else None."""
        return (now - self.issued_at).days if self.issued_at and now - self.issued_at > _STALE else None

    def require_not_older(self, kept: Published) -> None:
        """Raise `NotProved` if this set is older than `kept`, lacks one of its keys or undoes a revocation."""
        if problem := next(self._older(kept), None):
            raise NotProved(f"The key set cannot be trusted: {problem}. Ask the provider.")

    def _older(self, kept: Published) -> Iterator[str]:
        ours = {each.key_id: each for each in self.keys.keys}
        for each in kept.keys.keys:
            if each.key_id not in ours:
                yield f"{each.key_id}, which the set kept here has, is missing"
            elif each.revoked_at and not ours[each.key_id].revoked_at:
                yield f"{each.key_id}, which was revoked, is no longer revoked"
        if self.keys.version < kept.keys.version:
            yield f"its version is {self.keys.version}, and {kept.keys.version} was seen before"
        if kept.issued_at and (self.issued_at is None or self.issued_at < kept.issued_at):
            yield f"it is older than the one of {kept.issued_at.isoformat(timespec='seconds')} that is kept here"


def publish(keys: KeySet, key: Ed25519PrivateKey, now: datetime) -> str:
    """Return a key set as JSON text, signed now with `key`, which must be the current one."""
    record = json.dumps(asdict(keys) | {"issued_at": now.isoformat(timespec="seconds")}, indent=2)
    return json.dumps({"record": record, "signature": sign_bytes(record.encode(), key)}, indent=2) + "\n"


def fetch_keys(place: str) -> Published:
    """Return the key set at a URL or in a file; raise `InvalidKey` for an invalid one."""
    return read(_download(place) if "://" in place else _content(Path(place)), place)


def read(content: bytes, place: str) -> Published:
    """Read a key set, signed or not; raise `InvalidKey` if it is invalid or not signed by its current key."""
    try:
        found: dict[str, Any] = json.loads(content)
        if "record" not in found:
            return Published(key_set.of_mapping(found, place), None, content.decode())
        record: dict[str, Any] = json.loads(found["record"])
        issued_at = datetime.fromisoformat(record.pop("issued_at")).astimezone(UTC)
        keys = key_set.of_mapping(record, place)
        signer = check(found["record"].encode(), json.dumps(found["signature"]).encode(), None, "the key set")
        keys.require(signer)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise InvalidKey(f"{place} is no set of signing keys.") from None
    except NotProved as error:
        raise InvalidKey(f"The key set {place} cannot be trusted. {error.message}") from None
    if signer != keys.current:
        raise InvalidKey(f"The key set {place} is signed by {signer}, and not by its current key.")
    return Published(keys, issued_at, content.decode())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidKey(f"The key set {path} cannot be read: {error.strerror}.") from None


def _download(address: str) -> bytes:
    """Download a key set over https, or over http from this machine."""
    _check_address(address)
    try:
        with urlopen(Request(address), timeout=_WAIT_S) as answer:  # noqa: S310 - https, or this machine
            _check_address(answer.url)  # after redirects
            content: bytes = answer.read(_MAX_BYTES)
            return content
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise InvalidKey(f"The key set cannot be fetched from {address}: {error}.") from None


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise InvalidKey(f"{address} is no address: {error}.") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise InvalidKey(f"{address} is not fetched: give an https address, or a file.")

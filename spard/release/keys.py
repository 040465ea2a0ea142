"""A provider's Ed25519 keys: PEM files, and the set of public keys that customers trust.

The private key signs manifests, the public key verifies them. In the set one key is current, older ones remain valid,
and revoked ones are not. The set is a JSON file with public keys only. The provider publishes it (`publish`), and
customers obtain it from the same place as a public key. Everything signed by a revoked key is rejected, even from
before the revocation: nothing proves the time of a signature.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.errors import InvalidKey, NotProved
from spard.release.manifest import check, key_id, sign_bytes
from spard.replacement import replacement

OWN_KEY = "signing_key.pem"  # in the data folder, if the installation generated its key
MAKE = "openssl genpkey -algorithm ed25519 -out FILE"


def read_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key; raise `InvalidKey` if it is invalid or readable by everybody on this machine."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & stat.S_IROTH:
            raise InvalidKey(f"Everybody on this machine can read the signing key {path}: chmod 600 it.")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InvalidKey(f"The signing key {path} cannot be read: {error.strerror}.") from None
    except (TypeError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidKey(f"{path} is no Ed25519 private key in PEM; make one with `{MAKE}`.")
    return key


def read_public(path: Path) -> Ed25519PublicKey:
    """Read a public key; raise `InvalidKey` if the file is no Ed25519 key."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidKey(f"{path} is no Ed25519 public key in PEM.")
    return key


def public_pem(key: Ed25519PrivateKey) -> str:
    """Return the public half of a key as PEM text."""
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()


KEY_SET_FILE = "signing_keys.json"  # beside the signing key


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One public key; `revoked_at` is ISO 8601 in UTC."""

    key_id: str
    public_key: str
    revoked_at: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class KeySet:
    """All keys, without duplicates; `current` is the id of the signing key; `version` increases with each change."""

    current: str
    keys: tuple[KnownKey, ...]
    version: int = 0

    @classmethod
    def from_key(cls, public: Ed25519PublicKey) -> KeySet:
        """Return a set whose only key is the current one."""
        return cls(key_id(public), (_known_key(public),))

    def ids(self) -> list[str]:
        """Return the ids of the keys that are not revoked."""
        return [each.key_id for each in self.keys if each.revoked_at is None]

    def require(self, name: str) -> None:
        """Raise `NotProved` unless the key is in the set and not revoked."""
        found = next((each for each in self.keys if each.key_id == name), None)
        if found is None:
            raise NotProved(f"It was signed by {name}, which is none of the provider's keys.")
        if found.revoked_at is not None:
            when = f"{found.key_id} was revoked on {found.revoked_at}: {found.reason}"
            raise NotProved(
                f"It was signed by a revoked key. {when}. What such a key signed earlier does not count either."
            )

    def rotate(self, public: Ed25519PublicKey) -> KeySet:
        """Return a set with another current key; a revoked key stays revoked."""
        is_new = key_id(public) not in [each.key_id for each in self.keys]
        return KeySet(key_id(public), (*self.keys, _known_key(public)) if is_new else self.keys, self.version + 1)

    def revoke(self, name: str, at: str, reason: str) -> KeySet:
        """Return a set with the key revoked, or this set if it is revoked already; raise `InvalidKey` if unknown."""
        found = next((each for each in self.keys if each.key_id == name), None)
        if found is None:
            raise InvalidKey(f"There is no key {name}.")
        if found.revoked_at is not None:
            return self
        marked = [replace(each, revoked_at=at, reason=reason) if each is found else each for each in self.keys]
        return replace(self, keys=tuple(marked), version=self.version + 1)

    def text(self) -> str:
        """Return the set as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the set to a file atomically."""
        with replacement(path) as aside:
            aside.write_text(self.text())


def read_key_set(path: Path) -> KeySet:
    """Read the set stored beside a signing key; raise `InvalidKey` for an invalid file."""
    try:
        found: Any = json.loads(path.read_text())
    except OSError as error:
        raise InvalidKey(f"The key set {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        found = None
    return of_mapping(found, str(path))


def of_mapping(found: Any, place: str) -> KeySet:
    """Return the set in a JSON object; raise `InvalidKey`, which names `place`, if it is invalid."""
    try:
        keys = tuple(KnownKey(**each) for each in found["keys"])
        # The id is a digest of the key, so a forged pair of id and key is detected here.
        if not all(each.key_id == key_id(_public(each)) for each in keys):
            raise InvalidKey(f"{place} names a key that its id does not fit.")
        return KeySet(found["current"], keys, int(found.get("version", 0)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidKey(f"{place} is no set of signing keys.") from None


def _known_key(public: Ed25519PublicKey) -> KnownKey:
    return KnownKey(key_id(public), base64.b64encode(public.public_bytes_raw()).decode())


def _public(known: KnownKey) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(base64.b64decode(known.public_key, validate=True))


# A provider's keys as published: the key set as text, dated, and signed by the current key.
#
# Whoever fetches the set trusts its source, as with a public key. The signature ties the text to the key that signs
# adapters; version and date reveal a set that is stale, or older than one seen before.

_STALE = timedelta(days=30)
_MAX_BYTES = 1 << 20
_WAIT_S = 30.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class PublishedKeys:
    """A key set, and the time of its signature; None for an unsigned set of an older version."""

    keys: KeySet
    issued_at: datetime | None
    text: str

    def age_days(self, now: datetime) -> int | None:
        """Return the age in days if it exceeds 30 days, when keys may have been revoked since; else None."""
        return (now - self.issued_at).days if self.issued_at and now - self.issued_at > _STALE else None

    def require_not_older(self, kept: PublishedKeys) -> None:
        """Raise `NotProved` if this set is older than `kept`, lacks one of its keys or undoes a revocation."""
        if problem := next(self._older(kept), None):
            raise NotProved(f"The key set cannot be trusted: {problem}. Ask the provider.")

    def _older(self, kept: PublishedKeys) -> Iterator[str]:
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


def fetch_keys(place: str) -> PublishedKeys:
    """Return the key set at a URL or in a file; raise `InvalidKey` for an invalid one."""
    return read_published(_download(place) if "://" in place else _content(Path(place)), place)


def read_published(content: bytes, place: str) -> PublishedKeys:
    """Read a key set, signed or not; raise `InvalidKey` if it is invalid or not signed by its current key."""
    try:
        found: dict[str, Any] = json.loads(content)
        if "record" not in found:
            return PublishedKeys(of_mapping(found, place), None, content.decode())
        record: dict[str, Any] = json.loads(found["record"])
        issued_at = datetime.fromisoformat(record.pop("issued_at")).astimezone(UTC)
        keys = of_mapping(record, place)
        signer = check(found["record"].encode(), json.dumps(found["signature"]).encode(), None, "the key set")
        keys.require(signer)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise InvalidKey(f"{place} is no set of signing keys.") from None
    except NotProved as error:
        raise InvalidKey(f"The key set {place} cannot be trusted. {error.message}") from None
    if signer != keys.current:
        raise InvalidKey(f"The key set {place} is signed by {signer}, and not by its current key.")
    return PublishedKeys(keys, issued_at, content.decode())


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

"""A provider's signing keys: one is current, older ones remain valid, and revoked ones are not.

The set is a JSON file with public keys only. The provider publishes it (`published_keys`), and customers obtain it from
the same place as a public key. Everything signed by a revoked key is rejected, even from before the revocation: nothing
proves the time of a signature.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from spard.errors import InvalidKey, NotProved
from spard.release.manifest import key_id
from spard.replacement import replacement

FILE = "signing_keys.json"  # beside the signing key


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


def read(path: Path) -> KeySet:
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

"""Load, create and rotate the key that signs adapters and records.

It is given as a PEM file, or created once by an embedded installation. The private key is read here and passed to the
signing code; it is in no row, log or archive.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from app.db.base import utc_now
from app.errors import Unfit
from app.settings import Settings
from spard.errors import InvalidKey, NotProved
from spard.isolation import kernel
from spard.release.keys import KEY_SET_FILE, MAKE, OWN_KEY, KeySet, publish, read_key_set, read_private
from spard.release.manifest import key_id as key_id_of
from spard.replacement import replacement


class NoSigningKey(Unfit):
    """Raised if there is no usable signing key."""

    code = "no_signing_key"


def signing_key(settings: Settings) -> Ed25519PrivateKey:
    """Return the signing key of this installation; the embedded mode creates one at its first start.

    Raises `NoSigningKey` if it is missing, unreadable or revoked.
    """
    path = _path(settings)
    if settings.signing_key is None and not path.exists():
        if not settings.is_embedded():
            text = "SPARD_SIGNING_KEY is not set; several machines need one key to sign adapters with."
            raise NoSigningKey(f"{text} Make one with `{MAKE}` and give all of them its path.")
        _make(path)
    key = _read(path)
    try:
        _read_known_keys(path, key.public_key()).require(key_id_of(key.public_key()))
    except (InvalidKey, NotProved) as error:
        raise NoSigningKey(f"The signing key {path} cannot be used. {error.message}") from None
    return key


def public_keys(settings: Settings) -> KeySet:
    """Return the public keys of this installation; raise `NoSigningKey` if there is none yet."""
    path = _path(settings)
    if not path.exists():
        raise NoSigningKey(f"There is no signing key at {path} yet: `spard up` makes one, or `{MAKE}`.")
    return _read_known_keys(path, _read(path).public_key())


def published_keys(settings: Settings) -> str:
    """Return the public keys of this installation as JSON text, signed now by the current one."""
    return publish(public_keys(settings), signing_key(settings), utc_now())


def rotate(settings: Settings) -> KeySet:
    """Replace the signing key by a new one and return the key set; the old key stays valid for verification.

    The old private key is deleted.
    """
    known, path = public_keys(settings), _path(settings)
    try:
        with replacement(path) as aside:
            _write_new_key(aside)
            known = known.rotate(_read(aside).public_key())
            known.write(_set_path(path))  # written first, so that the new key is never used before the set contains it
    except OSError as error:
        raise NoSigningKey(f"The signing key {path} cannot be replaced: {error.strerror}.") from None
    return known


def revoke(settings: Settings, key_id: str, reason: str) -> KeySet:
    """Revoke a key: its signatures are no longer valid. Raises `NoSigningKey` for the current key; rotate it first."""
    known, path = public_keys(settings), _path(settings)
    if key_id == known.current:
        raise NoSigningKey(f"{key_id} is the key that signs: rotate it first with `spard keys rotate-signing`.")
    try:
        known = known.revoke(key_id, utc_now().isoformat(timespec="seconds"), reason)
        known.write(_set_path(path))
    except InvalidKey as error:
        raise NoSigningKey(error.message) from None
    except OSError as error:
        raise NoSigningKey(f"The key set beside {path} cannot be written: {error.strerror}.") from None
    return known


def _read_known_keys(path: Path, current: Ed25519PublicKey) -> KeySet:
    """Return the key set beside a key file, with this key as the current one; a changed key counts as a rotation."""
    known = read_key_set(_set_path(path)) if _set_path(path).exists() else KeySet.from_key(current)
    return known if known.current == key_id_of(current) else known.rotate(current)


def _set_path(path: Path) -> Path:
    return path.with_name(KEY_SET_FILE)


def _path(settings: Settings) -> Path:
    return settings.signing_key or settings.data_dir / OWN_KEY


def _make(path: Path) -> None:
    """Create a key file; of processes that start together, the first to link its file into place wins.

    Raises `NoSigningKey` if the folder does not take it.
    """
    aside = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new_key(aside)
        with suppress(FileExistsError):
            # A link fails if the name exists, where a rename would replace the key of another process.
            os.link(aside, path)
    except OSError as error:
        message = f"The signing key {path} cannot be made: {error.strerror}. Make one with `{MAKE}`"
        raise NoSigningKey(f"{message} and set SPARD_SIGNING_KEY to its path.") from None
    finally:
        aside.unlink(missing_ok=True)


def _write_new_key(path: Path) -> None:
    """Write a new private key to a new file that only this user can read."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Ed25519PrivateKey:
    """Read a private key; after that, other processes of this user cannot read this process's memory."""
    kernel.hide_memory()
    try:
        return read_private(path)
    except InvalidKey as error:
        raise NoSigningKey(error.message) from None

"""The key that signs what leaves the house: given as a PEM file, or made once by an installation that has one folder.

The private key is read here and handed to who signs; it stands in no row, no log and no archive.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from app.errors import InvalidRequest
from app.preflight import Unfit
from app.settings import Settings

_OWN = "signing_key.pem"
_MAKE = "openssl genpkey -algorithm ed25519 -out FILE"


class NoSigningKey(Unfit):
    """Nothing can be signed."""

    code = "no_signing_key"


def signing_key(settings: Settings) -> Ed25519PrivateKey:
    """The key of this installation; the embedded mode makes one when it starts for the first time."""
    path = _path(settings)
    if settings.signing_key is None and not path.exists():
        if not settings.is_embedded():
            text = "SPARD_SIGNING_KEY is not set; several machines need one key to sign adapters with."
            raise NoSigningKey(f"{text} Make one with `{_MAKE}` and give all of them its path.")
        _make(path)
    return _read(path)


def public_pem(key: Ed25519PrivateKey) -> str:
    """What customers check signatures with."""
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()


def read_public(path: Path) -> Ed25519PublicKey:
    """A public key from a PEM file."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidRequest(f"{path} is no Ed25519 public key in PEM.", param="--public-key")
    return key


def own_public(settings: Settings) -> Ed25519PublicKey | None:
    """The key of this installation, if it has one; none is made."""
    return _read(_path(settings)).public_key() if _path(settings).exists() else None


def _path(settings: Settings) -> Path:
    return settings.signing_key or settings.data_dir / _OWN


def _make(path: Path) -> None:
    """Processes that start together end up with one key: the first to link its file into place."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(aside, path)
    aside.unlink()


def _read(path: Path) -> Ed25519PrivateKey:
    try:
        if stat.S_IMODE(path.stat().st_mode) & stat.S_IROTH:
            raise NoSigningKey(f"Everybody on this machine can read the signing key {path}: chmod 600 it.")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise NoSigningKey(f"The signing key {path} cannot be read: {error.strerror}.") from None
    except (TypeError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise NoSigningKey(f"{path} is no Ed25519 private key in PEM; make one with `{_MAKE}`.")
    return key

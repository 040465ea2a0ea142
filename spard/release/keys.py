"""Ed25519 keys in PEM files: the private key signs manifests, the public key verifies them."""

from __future__ import annotations

import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.errors import InvalidKey

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

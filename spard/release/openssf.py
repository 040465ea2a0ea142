"""Writes an OpenSSF model-signing bundle of a folder, for tools that do not know our manifest.

The bundle format supports keys on elliptic curves (P-256, P-384, P-521) but not Ed25519, so it needs a separate key.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from model_signing import signing

from spard.errors import InvalidKey

MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out FILE"


def sign_folder(folder: Path, key: Path, bundle: Path) -> None:
    """Write the bundle for all files of a folder; raise `InvalidKey` for an unsupported key."""
    try:
        is_curve = isinstance(load_pem_private_key(key.read_bytes(), None), EllipticCurvePrivateKey)
        config = _config().use_elliptic_key_signer(private_key=key) if is_curve else None
    except (OSError, TypeError, ValueError):
        config = None
    if config is None:
        raise InvalidKey(f"{key} is no key on a curve that OpenSSF's bundles know; make one with `{MAKE}`.")
    config.sign(folder, bundle)


def _config() -> signing.Config:
    return signing.Config()  # type: ignore[no-untyped-call]  # typed, but for its constructor

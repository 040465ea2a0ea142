"""The signed manifest of an adapter: digests of all its files, and a verification that needs no torch.

`manifest.json` lists every other file of the folder with its SHA-256 and size. `manifest.sig` beside it has an Ed25519
signature of the manifest's bytes, the public key and the key's id. `verify` reads a folder or an archive and accepts it
only if it is, byte for byte, the one that the owner of the key has signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypedDict

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.digests import MANIFEST, SIGNATURE, FileFacts, Manifest
from spard.errors import NotProved
from spard.release.archive import find_root, is_ignored, open_packed

_ALGORITHM = "ed25519"
_READ_BYTES = 64 << 20  # maximum size of a manifest or signature

_KEPT = 4  # maximum manifests and signatures: at the archive's root and in its one folder


@dataclass(frozen=True, slots=True)
class VerifiedManifest:
    """The result of `verify`; `passed_over` are files outside the manifest that no loader reads."""

    manifest: Manifest
    manifest_sha256: str
    key_id: str
    files: int
    bytes: int
    passed_over: tuple[str, ...] = ()


def sign(folder: Path, key: Ed25519PrivateKey) -> None:
    """Write the detached signature of a folder's manifest."""
    (folder / SIGNATURE).write_text(json.dumps(sign_bytes((folder / MANIFEST).read_bytes(), key), indent=2) + "\n")


def sign_bytes(content: bytes, key: Ed25519PrivateKey) -> dict[str, str]:
    """Sign `content`; return the signature with everything needed to verify it."""
    public = key.public_key()
    return {
        "algorithm": _ALGORITHM,
        "key_id": key_id(public),
        "public_key": _text(public.public_bytes_raw()),
        "signature": _text(key.sign(content)),
    }


def key_id(public: Ed25519PublicKey) -> str:
    """Return the id of a key, derived from its digest."""
    return f"ed25519:{hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]}"


def verify(path: Path, public: Ed25519PublicKey | None = None) -> VerifiedManifest:
    """Verify an adapter's signature and files; return the proved facts.

    Raises `NotProved` unless the signature is `public`'s and the files are exactly the ones in the manifest. Without
    `public` the key in the signature is used, which proves that nothing has changed since the signature, but not who
    signed.

        proved = verify(Path("adapter.tar.gz"), read_public(Path("provider.pem")))
    """
    kept, found = _read(path)
    for name in (MANIFEST, SIGNATURE):
        if name not in kept:
            raise NotProved(f"There is no {name}: this adapter is not signed.")
    signer = check(kept[MANIFEST], kept[SIGNATURE], public, MANIFEST)
    manifest: Manifest = _object(kept[MANIFEST], MANIFEST)
    _compare(manifest.get("files"), found)
    digest = hashlib.sha256(kept[MANIFEST]).hexdigest()
    signed_files = manifest["files"]
    passed_over = tuple(sorted(found.keys() - signed_files.keys()))
    return VerifiedManifest(
        manifest, digest, signer, len(signed_files), sum(found[name]["bytes"] for name in signed_files), passed_over
    )


def check(content: bytes, signature: bytes, public: Ed25519PublicKey | None, name: str) -> str:
    """Return the id of the key that signed `content`; raise `NotProved` for a bad signature or another key.

    `signature` is the JSON of `sign_bytes`; `name` is the subject in error messages.
    """
    stated = _object(signature, f"the signature of {name}")
    try:
        own = Ed25519PublicKey.from_public_bytes(base64.b64decode(stated["public_key"], validate=True))
        value = base64.b64decode(stated["signature"], validate=True)
        is_known = stated["algorithm"] == _ALGORITHM and stated["key_id"] == key_id(own)
    except (KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        raise NotProved(f"The signature of {name} cannot be read.")
    # The key in the signature is untrusted and only tells which key claims to have signed; `public` decides.
    if public is not None and key_id(public) != key_id(own):
        raise NotProved(f"{name} was signed by another key: {key_id(own)}, not {key_id(public)}.")
    try:
        own.verify(value, content)
    except InvalidSignature:
        raise NotProved(f"{name} is not what was signed: the signature does not match.") from None
    return key_id(own)


class Person(TypedDict, total=False):
    """A person of a waiver: the owner of a key, or the key's name."""

    owner: str | None
    name: str


class WaiverFacts(TypedDict):
    """The facts of a waiver that `spard verify` tells; `expires_at` is a Unix time."""

    manifest_sha256: str
    reason: str
    proposed_by: Person
    approved_by: Person
    expires_at: int


def verify_waiver(
    path: Path, adapter: VerifiedManifest, public: Ed25519PublicKey | None = None, known: Collection[str] = ()
) -> WaiverFacts:
    """Return the facts of a waiver; raise `NotProved` unless it releases this adapter.

    It must be signed by the key of the adapter, or by a key whose id is in `known`.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotProved(f"{path.name} cannot be read: {error.strerror}.") from error
    stated = _object(text, path.name)
    record, signature = str(stated.get("record")).encode(), json.dumps(stated.get("signature")).encode()
    signer = check(record, signature, public, "the waiver")
    facts: WaiverFacts = _object(record, "the waiver's record")
    if signer not in (adapter.key_id, *known) or facts.get("manifest_sha256") != adapter.manifest_sha256:
        raise NotProved("The waiver is for another adapter.")
    return facts


def _read(path: Path) -> tuple[dict[str, bytes], dict[str, FileFacts]]:
    """Read an adapter once: content of manifest and signature, SHA-256 and size of every other file by name."""
    kept: dict[str, bytes] = {}
    found: dict[str, FileFacts] = {}
    with open_packed(path) as files:
        for name, file in files:
            if name in found:
                raise NotProved(f"{name} is in the archive more than once.")
            is_own = name.count("/") <= 1 and name.rpartition("/")[2] in (MANIFEST, SIGNATURE)
            # Size and number are bounded, because an archive is untrusted until its signature is verified.
            content = file.read(_READ_BYTES) if is_own and len(kept) < _KEPT else b""
            found[name] = _file_facts(file)
            if is_own:
                kept[name] = content
    root = "" if path.is_dir() else find_root(found, MANIFEST)
    own = {name: kept[root + name] for name in (MANIFEST, SIGNATURE) if root + name in kept}
    files_of = {name.removeprefix(root): facts for name, facts in found.items()}
    return own, {name: facts for name, facts in files_of.items() if name not in own}


def _compare(listed: Any, found: Mapping[str, FileFacts]) -> None:
    if not isinstance(listed, dict):
        raise NotProved(f"{MANIFEST} lists no files.")
    if missing := sorted(listed.keys() - found.keys()):
        raise NotProved(f"{missing[0]} is missing.")
    if extra := sorted(name for name in found.keys() - listed.keys() if not is_ignored(name)):
        raise NotProved(f"{extra[0]} is not in the manifest.")
    if changed := sorted(name for name in listed if listed[name] != found[name]):
        raise NotProved(f"{changed[0]} was changed: its SHA-256 or size is not the manifest's.")


def _file_facts(file: IO[bytes]) -> FileFacts:
    whole, size = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        whole.update(chunk)
        size += len(chunk)
    return {"sha256": whole.hexdigest(), "bytes": size}


def _object(content: bytes, name: str) -> Any:
    """Return a JSON object, whose values are still to be checked; raise `NotProved` for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NotProved(f"{name} is no JSON object.")
    return value


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()

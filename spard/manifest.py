"""What an adapter is, in a file that can be signed: digests of all its bytes, and a check that needs no torch.

`manifest.json` names every other file of the folder with its SHA-256 and size. `manifest.sig` beside it holds an
Ed25519 signature of the manifest's bytes, the public key and the key's id. `verify` reads a folder or its tar.gz; what
it does not refuse is, byte for byte, what the holder of the key has signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.errors import NotProved

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
_ALGORITHM = "ed25519"
_READ_BYTES = 64 << 20  # of a manifest or a signature at most

File = tuple[str, IO[bytes]]


@dataclass(frozen=True, slots=True)
class Proved:
    """What `verify` found to be so."""

    manifest: dict[str, Any]
    manifest_sha256: str
    key_id: str
    files: int
    bytes: int


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write `facts` and the digest of every file that lies in `folder` into its manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, SIGNATURE))
    files = {
        path.relative_to(folder).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in paths
    }
    manifest = {**facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest


def sign(folder: Path, key: Ed25519PrivateKey) -> None:
    """Write the detached signature of a folder's manifest."""
    (folder / SIGNATURE).write_text(json.dumps(signed((folder / MANIFEST).read_bytes(), key), indent=2) + "\n")


def signed(content: bytes, key: Ed25519PrivateKey) -> dict[str, str]:
    """The signature of some bytes, with what is needed to check it."""
    public = key.public_key()
    return {
        "algorithm": _ALGORITHM,
        "key_id": key_id(public),
        "public_key": _text(public.public_bytes_raw()),
        "signature": _text(key.sign(content)),
    }


def key_id(public: Ed25519PublicKey) -> str:
    """A short name of a key that nobody can choose."""
    return f"ed25519:{hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]}"


def verify(path: Path, public: Ed25519PublicKey | None = None) -> Proved:
    """Raise `NotProved` unless the signature is `public`'s and the files are those that it covers, and no others.

    Without a key the one that came along is taken: then it is proved that nothing was changed since it was signed, and
    not who signed it.
    """
    kept: dict[str, bytes] = {}
    found: dict[str, dict[str, Any]] = {}
    with _opened(path) as files:
        for name, file in files:
            if name in kept or name in found:
                raise NotProved(f"{name} is there twice.")
            if name in (MANIFEST, SIGNATURE):
                kept[name] = file.read(_READ_BYTES)
            else:
                found[name] = _measured(file)
    for name in (MANIFEST, SIGNATURE):
        if name not in kept:
            raise NotProved(f"There is no {name}: this adapter is not signed.")
    signer = check(kept[MANIFEST], kept[SIGNATURE], public, MANIFEST)
    manifest = _object(kept[MANIFEST], MANIFEST)
    _compare(manifest.get("files"), found)
    digest = hashlib.sha256(kept[MANIFEST]).hexdigest()
    return Proved(manifest, digest, signer, len(found), sum(facts["bytes"] for facts in found.values()))


def check(content: bytes, signature: bytes, public: Ed25519PublicKey | None, name: str) -> str:
    """The id of the key that signed `content`; `NotProved` when it is another key's, or nobody's."""
    stated = _object(signature, f"the signature of {name}")
    try:
        own = Ed25519PublicKey.from_public_bytes(base64.b64decode(stated["public_key"], validate=True))
        value = base64.b64decode(stated["signature"], validate=True)
        is_known = stated["algorithm"] == _ALGORITHM and stated["key_id"] == key_id(own)
    except (KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        raise NotProved(f"The signature of {name} cannot be read.")
    if public is not None and key_id(public) != key_id(own):
        raise NotProved(f"{name} was signed by another key: {key_id(own)}, not {key_id(public)}.")
    try:
        own.verify(value, content)
    except InvalidSignature:
        raise NotProved(f"{name} is not what was signed: the signature does not match.") from None
    return key_id(own)


def verify_waiver(path: Path, adapter: Proved, public: Ed25519PublicKey | None = None) -> dict[str, Any]:
    """What a signed waiver says; `NotProved` unless it is signed as the adapter is, and releases just this one."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotProved(f"{path.name} cannot be read: {error.strerror}.") from error
    stated = _object(text, path.name)
    record, signature = str(stated.get("record")).encode(), json.dumps(stated.get("signature")).encode()
    signer = check(record, signature, public, "the waiver")
    facts = _object(record, "the waiver's record")
    if signer != adapter.key_id or facts.get("manifest_sha256") != adapter.manifest_sha256:
        raise NotProved("The waiver is for another adapter.")
    return facts


def _compare(listed: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    if not isinstance(listed, dict):
        raise NotProved(f"{MANIFEST} lists no files.")
    if missing := sorted(listed.keys() - found.keys()):
        raise NotProved(f"{missing[0]} is missing.")
    if extra := sorted(found.keys() - listed.keys()):
        raise NotProved(f"{extra[0]} is not in the manifest.")
    if changed := sorted(name for name in listed if listed[name] != found[name]):
        raise NotProved(f"{changed[0]} was changed: its SHA-256 or size is not the manifest's.")


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[File]]:
    """The files of a folder or of an archive, one after the other."""
    if path.is_dir():
        yield _in_folder(path)
        return
    try:
        with tarfile.open(path, "r:*") as tar:
            yield _in_archive(tar)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise NotProved(f"{path.name} cannot be read as an archive: {error}.") from error


def _in_folder(folder: Path) -> Iterator[File]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise NotProved(f"{name} is a link or a device, not a file.")
        if path.is_file():
            with path.open("rb") as file:
                yield name, file


def _in_archive(tar: tarfile.TarFile) -> Iterator[File]:
    for entry in tar:
        file = tar.extractfile(entry) if entry.isreg() else None
        if file is None or entry.name.startswith("/") or ".." in entry.name.split("/"):
            raise NotProved(f"The archive's entry {entry.name} is no plain file below its folder.")
        yield entry.name, file


def _measured(file: IO[bytes]) -> dict[str, Any]:
    whole, size = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        whole.update(chunk)
        size += len(chunk)
    return {"sha256": whole.hexdigest(), "bytes": size}


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise NotProved(f"{name} is no JSON object.")
    return value


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()

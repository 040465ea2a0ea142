"""SHA-256 digests of files, and the manifest of a folder, which `spard.release.manifest` signs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypedDict

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_OF_MODEL = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", f"{ADDITIONAL_TEMPLATES}/*.jinja")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_files(folder: Path) -> list[Path]:
    """Return the files that a base model's digest covers: weights, configuration and tokenizer, sorted by name."""
    return sorted({path for pattern in _OF_MODEL for path in folder.glob(pattern)})


def model_file_name(path: Path) -> str:
    """Return the name of a model file within the model's digest; additional templates include their folder."""
    return f"{path.parent.name}/{path.name}" if path.parent.name == ADDITIONAL_TEMPLATES else path.name


def folder_digest(folder: Path, sha256: Callable[[Path], str] = file_sha256) -> str:
    """Return the SHA-256 over names and bytes of a model's files; `sha256` returns the digest of a file."""
    return model_digest({model_file_name(path): sha256(path) for path in model_files(folder)})


def file_identities(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return device, inode, size and times of each model file, which nearly always change with its content."""
    found = ((model_file_name(path), path.stat()) for path in model_files(folder))
    return {name: (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in found}


def model_digest(sha256: Mapping[str, str]) -> str:
    """Return the digest of a base model from its files' digests by name, in the mapping's order."""
    whole = hashlib.sha256("".join(f"{name} {each}\n" for name, each in sha256.items()).encode())
    return f"sha256:{whole.hexdigest()}"


class FileFacts(TypedDict):
    """The digest and the size of a file, as a manifest lists them."""

    sha256: str
    bytes: int


class BaseSource(TypedDict, total=False):
    """Where a base model came from: a folder or the hub, and the digest of its bytes."""

    name: str
    revision: str | None
    digest: str


class RenderingFacts(TypedDict, total=False):
    """The part of a manifest's `rendering` that readers need.

    asked      the thinking mode of requests that name no mode
    arguments  the template's arguments in every rendering
    """

    asked: Literal["plain", "off", "on"]
    arguments: dict[str, object]


class GateFacts(TypedDict):
    """The gate's decision and its reasons in sentences."""

    decision: str
    reasons: list[str]


class DefenseFacts(TypedDict, total=False):
    """The defense of a recipe."""

    type: str


class RecipeFacts(TypedDict, total=False):
    """The part of a manifest's recipe that readers need."""

    defense: DefenseFacts


class Manifest(TypedDict, total=False):
    """The facts that readers take from a manifest; it has more facts than these, and older versions lack some."""

    files: dict[str, FileFacts]
    job_id: str | None
    base_model: str | None
    base_digest: str | None
    base_source: BaseSource | None
    rendering: RenderingFacts | None
    system_prompt: str | None
    tensor_digest: str | None
    gate: GateFacts
    audit: dict[str, list[dict[str, object]]] | None
    recipe: RecipeFacts | None
    data_sha256: dict[str, str] | None
    code: dict[str, str] | None
    checkpoint: dict[str, object]
    proof: dict[str, float]


def write_manifest(folder: Path, facts: Mapping[str, object]) -> dict[str, object]:
    """Write `facts` and the digest and size of every file in `folder` into its manifest; return the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, SIGNATURE))
    files = {
        path.relative_to(folder).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in paths
    }
    manifest = {**facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest

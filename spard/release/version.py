"""The code that made a result: package versions, and a digest of our sources that also changes between releases."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

AUDIT_VERSION = 2  # raised whenever audits ask or decide differently; reports of version 1 do not contain it
_LIBRARIES = ("torch", "transformers", "peft", "safetensors")
_ROOT = Path(__file__).resolve().parents[1]  # the package `spard`


def code_version() -> dict[str, str]:
    """Return the versions of this package, its main libraries and Python, and the digest of `spard`'s sources."""
    found = {name: package_version(name) for name in ("spard", *_LIBRARIES)}
    return found | {"python": platform.python_version(), "sources": source_digest(_ROOT)}


def source_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of all Python files below a folder."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"sha256:{whole.hexdigest()}"


def package_version(name: str) -> str:
    """Return the version of an installed package, or `unknown`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"

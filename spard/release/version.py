"""Which code made something: versions, and a digest of our own sources, which holds between releases too."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

AUDIT_VERSION = 2  # raised whenever audits ask or decide otherwise; reports of 1 do not say it
_LIBRARIES = ("torch", "transformers", "peft", "safetensors")
_ROOT = Path(__file__).resolve().parents[1]  # the package `spard`


def code_version() -> dict[str, str]:
    """Versions of this package and of what computes for it, and the digest of `spard`'s sources."""
    found = {name: package_version(name) for name in ("spard", *_LIBRARIES)}
    return found | {"python": platform.python_version(), "sources": source_digest(_ROOT)}


def source_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the Python files below a folder."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"sha256:{whole.hexdigest()}"


def package_version(name: str) -> str:
    """Return the version of an installed package, `unknown` where it is not installed as one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"

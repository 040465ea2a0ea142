"""Packages of other people, installed in a folder: modules, and the metadata that pip would leave beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]


def install(folder: Path, name: str, entries: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Leave a package in a folder; `entries` are its entry points by group, `modules` their source."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(dedent(source))
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in found.items())])
        for group, found in entries.items()
    )
    (metadata / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def run_script(folder: Path, code: str) -> None:
    """Run a script in a process of its own, which finds the packages in `folder`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

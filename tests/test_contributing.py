"""The guides of CONTRIBUTING.md are true: each is applied to a copy of the repository, and its test run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("app", "migrations", "spard", "tests", "tools", "worker", "pyproject.toml")
BLOCK = re.compile(r"(?:^`([\w./]+)`\n\n)?^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What to run at the end of a guide. The storage's test is one that every storage passes.
CHECKS = {
    "a defense": ["tests/spard/test_penalty.py"],
    "a judge": ["tests/spard/test_prefix_judge.py"],
    "an endpoint": ["tests/app/http/test_file_count.py"],
    "a stage": ["tests/spard/test_norms.py"],
    "a storage": ["tests/app/test_storage.py", "-k", "memory"],
}


@dataclass(frozen=True)
class Block:
    """One block of a guide: a new file, or a change of the lines of a file."""

    path: str
    kind: str
    text: str

    def apply(self, root: Path) -> None:
        """Write the file, or change the one place where the old lines stand."""
        path = root / self.path
        if self.kind == "python":
            assert not path.exists(), f"{self.path} is there already"
            path.write_text(self.text)
            return
        old, new = self._lines(" -"), self._lines(" +")
        source = path.read_text()
        assert source.count(old) == 1, f"{self.path} has these lines {source.count(old)} times:\n{old}"
        path.write_text(source.replace(old, new))

    def _lines(self, marks: str) -> str:
        return "".join(line[1:] for line in self.text.splitlines(keepends=True) if line[0] in marks)


def guides() -> dict[str, list[Block]]:
    """The blocks of each guide, by what it adds; a block without a file goes on with the one before."""
    _, *parts = re.split(r"^### How to add (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    return {title: list(blocks(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def blocks(text: str) -> Iterator[Block]:
    """The blocks of one guide, in order."""
    path = ""
    for named, kind, body in BLOCK.findall(text):
        path = named or path
        yield Block(path, kind, body)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and their tests, in a folder of its own."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.tar.xz")  # what is compiled is copied with its times, and holds
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def run(program: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment on the copy, and nothing of the repository itself."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run_tests(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return run("python", ["-m", "pytest", "-p", "no:cacheprovider", *arguments], folder)


def test_every_guide_has_a_check() -> None:
    assert set(guides()) == set(CHECKS)


@pytest.mark.parametrize("title", CHECKS)
def test_the_guide_s_test_passes_once_all_its_blocks_are_applied(title: str, copy: Path) -> None:
    for block in guides()[title]:
        block.apply(copy)

    done = run_tests(CHECKS[title], copy)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize("title", CHECKS)
def test_the_guide_s_test_fails_without_its_production_code(title: str, copy: Path) -> None:
    for block in guides()[title]:
        if block.path.startswith("tests/"):
            block.apply(copy)

    assert run_tests(CHECKS[title], copy).returncode != 0


def test_what_the_guides_write_is_formatted_and_keeps_the_layers(copy: Path) -> None:
    every = [block for found in guides().values() for block in found]
    for block in every:
        block.apply(copy)
    paths = sorted({block.path for block in every})

    for program, arguments in (
        ("ruff", ["check", *paths]),
        ("ruff", ["format", "--check", *paths]),
        ("lint-imports", ["--no-cache"]),
    ):
        done = run(program, arguments, copy)
        assert done.returncode == 0, done.stdout + done.stderr

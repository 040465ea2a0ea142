"""What the documents cite is there: numbered rows, files, and the targets of links."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {"build", "data", "models", "node_modules", "out"}
# Faults, bad inputs, attacks, invariants, and differences between the paper and the authors' code.
NUMBER = re.compile(r"\b([FBAID])([1-9]\d?)(?:(?:-| to )([FBAID])([1-9]\d?))?\b")
ROW = re.compile(r"^\| ([FBAID][1-9]\d?) \|", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.py)`|`(test_\w+\.py)`")
NEW_FILE = re.compile(r"^`[\w./]+`\n\n(?=```python$)", re.MULTILINE)  # the name above a file that a guide adds
OTHERS = {"F32"}  # also a data type of safetensors


def documents() -> list[Path]:
    """Every Markdown file of the repository but those below hidden or generated folders."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in SKIPPED and path.name[0] != "."]
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def cited_numbers(text: str) -> Iterator[str]:
    """The numbers in a text; a range such as F2-F7 names all between its ends."""
    for first, low, last, high in NUMBER.findall(text):
        ends = (int(low), int(high)) if last == first else (int(low), int(low))
        yield from (f"{first}{number}" for number in range(ends[0], ends[1] + 1))


def broken_links(text: str, folder: Path) -> list[str]:
    """The relative targets of a text's links that are no file and no folder."""
    targets = [target for target in LINK.findall(text) if not re.match(r"[a-z]+:|#", target)]
    return [target for target in targets if not (folder / target.partition("#")[0]).exists()]


def missing_files(text: str) -> list[str]:
    """The Python files named in a text that are neither below the root nor below `tests`, nor written in full there."""
    names = [path or name for path, name in PATH.findall(NEW_FILE.sub("", text))]
    return [name for name in names if not any((ROOT / base / name).is_file() for base in ("", "tests"))]


def test_every_number_that_is_cited_is_defined_once() -> None:
    defined = Counter(number for path in documents() for number in ROW.findall(path.read_text()))
    assert {number: times for number, times in defined.items() if times > 1} == {}
    assert {number[0] for number in defined} == set("FBAID")
    sources = [*documents(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    unknown = {
        f"{path.relative_to(ROOT)}: {number}"
        for path in sources
        if path != Path(__file__).resolve()
        for number in cited_numbers(path.read_text())
        if number not in defined and number not in OTHERS
    }
    assert unknown == set()


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_links_to_and_names_files_that_exist(path: Path) -> None:
    text = path.read_text()
    assert broken_links(text, path.parent) == []
    if path.name != "CHANGELOG.md":  # tells of files as they were
        assert missing_files(text) == []


def test_ranges_and_single_numbers_are_read() -> None:
    assert list(cited_numbers("F2-F4, B12 to B13 and A8; S3, F100, C1")) == ["F2", "F3", "F4", "B12", "B13", "A8"]


def test_dead_links_and_missing_files_are_found() -> None:
    text = "[a](README.md), [b](README.md#use-it), [c](https://example.org/x), [d](gone.md) and `tests/gone.py`"
    assert broken_links(text, ROOT) == ["gone.md"]
    assert missing_files(text) == ["tests/gone.py"]
    assert missing_files("`tests/new.py`\n\n```python\n```") == []


def test_the_changelog_is_short_and_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    projects = [
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "service/pyproject.toml")
    ]
    assert len(text.encode()) <= 12_000
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[:2] == ["Unreleased", projects[0]["version"]]
    assert projects[0]["version"] == projects[1]["version"]


def test_a_change_has_an_area_and_at_most_two_lines() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    points = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(points) > 20
    assert [point for point in points if not re.match(r"- [A-Z][a-z ]+: ", point) or point.count("\n") > 1] == []

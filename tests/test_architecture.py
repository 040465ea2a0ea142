"""docs/architecture.md draws what the code holds: the transitions of a job, and the layers of each package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from app.jobs.transitions import TRANSITIONS

ROOT = Path(__file__).resolve().parents[1]
ARROW = re.compile(r"^    (\w+) --> (\w+): (.+)$", re.MULTILINE)


def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def layers(package: str) -> list[list[str]]:
    """The modules of each layer that the import contract names, from the top; those that are not there are left out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("containers") == [package])
    named = [[name.strip(" ()") for name in layer.split("|")] for layer in contract["layers"]]
    folder = ROOT / package
    return [
        [each for each in layer if (folder / each).is_dir() or (folder / f"{each}.py").is_file()] for layer in named
    ]


def test_the_diagram_of_a_job_s_status_is_the_table_of_transitions() -> None:
    assert ARROW.findall(page()) == [(each.source, each.target, each.cause) for each in TRANSITIONS]


@pytest.mark.parametrize("package", ["spard", "app", "worker"])
def test_the_table_of_a_package_has_the_layers_of_its_contract(package: str) -> None:
    section = page().partition(f"\n### {package}/\n")[2].partition("\n#")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert [re.findall(r"`(\w+)`", row) for row in rows] == layers(package)

"""Every block of code in the documents is run by a test, or marked with the reason why not."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from spard.config import extensions
from tests import blocks

ROOT = blocks.ROOT
WALK, HERE = "tests/test_walk.py", "tests/test_blocks.py"
# The tests that run the blocks of a page; each names the page.
RUN_BY: dict[str, tuple[str, ...]] = {
    "CONTRIBUTING.md": ("tests/test_contributing.py",),
    "README.md": (WALK,),
    "docs/adapters.md": (WALK,),
    "docs/agents.md": ("tests/test_agents.py",),
    "docs/api.md": ("tests/app/http/test_documented_calls.py",),
    "lab/docs/bench.md": (HERE,),
    "docs/checkpoints.md": (WALK,),
    "docs/deployment.md": ("tests/test_production.py",),
    "docs/extending.md": (HERE,),
    "docs/jobs.md": (WALK,),
    "docs/library.md": ("tests/spard/test_safe_rows.py", "tests/spard/test_library.py", HERE),
    "docs/move-in.md": (WALK,),
    "docs/provider.md": (WALK,),
    "docs/quickstart.md": (WALK,),
    "docs/serving.md": (WALK,),
}
# Pages with a package of one's own: its modules, and the entry points that name them.
PACKAGES = ("docs/library.md", "docs/extending.md", "lab/docs/bench.md")


@pytest.mark.parametrize("page", blocks.pages())
def test_each_block_is_run_or_marked(page: str) -> None:
    left = [block.text for block in blocks.blocks(page) if block.reason is None]
    assert bool(left) == (page in RUN_BY), "name the test that runs it, or write <!-- not run: REASON --> before it"
    assert [text.splitlines()[0] for text in blocks.indented_blocks(page)] == [], "fence it"
    for test in RUN_BY.get(page, ()):
        assert page.rpartition("/")[2] in (ROOT / test).read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_reasons_are_given_and_name_tests_that_exist() -> None:
    reasons = [block.reason for page in blocks.pages() for block in blocks.blocks(page) if block.reason]
    assert len(reasons) > 10
    named = [word.strip(";,.") for reason in reasons for word in reason.split() if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PACKAGES)
def test_a_package_of_one_s_own_has_what_its_entry_points_name(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    for block in blocks.to_run(page, "python"):
        if block.text.startswith("# my_package/"):
            name = block.text.split()[1].rstrip(":")
            (tmp_path / name).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)
    (points,) = (tomllib.loads(block.text)["project"]["entry-points"] for block in blocks.to_run(page, "toml"))
    for group, entries in points.items():
        assert group.startswith("spard.")
        for value in entries.values():
            module, _, attribute = value.partition(":")
            found = getattr(import_module(module), attribute)
            _try(group, found)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def _try(group: str, found: Any) -> None:
    """Use what an entry point names, as its registry would."""
    match group:
        case "spard.judges":
            assert group == extensions.JUDGES.group
            verdicts = found(None).judge(["p", "p"], ["Sure, take it.", "No."])
            assert [verdict.score for verdict in verdicts] == [5, 1]
        case "spard.defenses":
            module, _, method = found.method.partition(":")
            assert callable(getattr(import_module(module), method)(found()).finish_)
        case _:
            assert found.name

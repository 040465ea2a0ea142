"""The levels leave out what their rows say, and never a whole area."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import levels
from tests.levels import BOTH_COLORS, BOTH_DATABASES, SLOW, SOAK, belongs, soak_reason

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests import levels

levels.SLOW = ("test_it.py::test_of_a_whole_service",)

def pytest_addoption(parser):
    levels.add_option(parser)

def pytest_configure(config):
    levels.register(config)
"""
TESTS = """
import multiprocessing, pytest, subprocess, sys

@pytest.fixture
def postgres_server(): ...

def test_plain(): ...
def test_of_a_whole_service(): ...
def test_on_a_server(postgres_server): ...
def test_in_a_process():
    subprocess.run([sys.executable, "-c", ""])
def test_in_a_process_with_a_file():
    file = open(__file__)
    with subprocess.Popen([sys.executable, "-c", ""], stdin=file):
        file.close()
def test_in_a_fork():
    multiprocessing.get_context("fork").Process(target=print).start()
@pytest.mark.parametrize("database_url", ["sqlite", "postgres"])
def test_of_a_database(database_url): ...
"""


def make_item(nodeid: str, *fixtures: str, **params: object) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, fixturenames=fixtures, callspec=SimpleNamespace(params=params))


def outcomes(folder: Path, *arguments: str) -> dict[str, str]:
    """Run the tests above at a level; return what became of each."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_it.py", *arguments]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"::(test_\S+) (PASSED|SKIPPED|FAILED)", done.stdout))


PROCESSES = ("test_in_a_process", "test_in_a_process_with_a_file", "test_in_a_fork")
PLAIN = {"test_plain": "PASSED", "test_of_a_database[sqlite]": "PASSED"}
GUARDS = PLAIN | {"test_on_a_server": "PASSED"} | dict.fromkeys(PROCESSES, "PASSED")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--level", "fast"], PLAIN | dict.fromkeys(PROCESSES, "SKIPPED")),
        (["--level", "test"], GUARDS),
        (["--level", "slow"], {"test_of_a_whole_service": "PASSED"}),
        (["--level", "soak"], {"test_of_a_database[postgres]": "PASSED"}),
        ([], GUARDS | dict.fromkeys(("test_of_a_whole_service", "test_of_a_database[postgres]"), "PASSED")),
    ],
)
def test_a_level_runs_its_tests(tmp_path: Path, arguments: list[str], expected: Mapping[str, str]) -> None:
    assert outcomes(tmp_path, *arguments) == expected


ON_BOTH = frozenset(f"tests/app/test_signing.py::test_it[{name}]" for name in ("sqlite", "postgres"))


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_each_test_is_in_the_soak_or_in_the_test(database: str) -> None:
    item = make_item(f"tests/app/test_signing.py::test_it[{database}]", "database_url", database_url=database)
    assert belongs(item, "test", ON_BOTH) != belongs(item, "soak", ON_BOTH)
    assert belongs(item, "soak", ON_BOTH) == (database == "postgres")


def test_a_slow_test_is_in_one_level() -> None:
    for name in (*levels.SLOW, "tests/app/test_signing.py"):
        item = make_item(f"{name}::test_it")
        found = [level for level in ("test", "slow", "soak") if belongs(item, level, {item.nodeid})]
        assert len(found) == 1, name


def test_what_is_tested_on_postgresql_alone_is_in_the_test() -> None:
    item = make_item("tests/app/test_signing.py::test_it[postgres]", database_url="postgres")
    assert belongs(item, "test", {item.nodeid})


def test_what_a_lock_does_is_tested_on_both_databases() -> None:
    for name in BOTH_DATABASES:
        ids = {f"{name}::test_it[sqlite]", f"{name}::test_it[postgres]"}
        item = make_item(f"{name}::test_it[postgres]", database_url="postgres")
        assert any(belongs(item, level, ids) for level in ("test", "slow"))


def test_a_page_is_looked_at_in_the_dark_where_colors_matter() -> None:
    (*_, colors) = BOTH_COLORS
    file = "tests/browser/test_dashboard.py::test_it"
    ids = {f"{name}[{color}]" for name in (colors, file) for color in ("dark", "light")}
    assert soak_reason(f"{colors}[dark]", {"context": "dark"}, ids) == ""
    assert soak_reason(f"{file}[dark]", {"context": "dark"}, ids) != ""
    assert soak_reason(f"{file}[light]", {"context": "light"}, ids) == ""


def test_no_folder_is_left_out_of_the_test_as_a_whole() -> None:
    whole = {ROOT / name for name in SOAK if "::" not in name}
    for folder in {path.parent for path in whole}:
        assert {*folder.glob("test_*.py")} - whole, folder


def test_each_row_names_files_that_are_there_and_says_why() -> None:
    for name in (*SOAK, *SLOW, *BOTH_DATABASES, *BOTH_COLORS):
        assert (ROOT / name.partition("::")[0]).exists(), name
    assert all(len(reason.split()) > 5 for reason in SOAK.values())


def test_a_row_whose_test_has_another_name_now_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "SOAK", {"tests/test_a.py::test_old": "because of a reason that is long enough"})
    items = [make_item("tests/test_a.py::test_new"), make_item("tests/test_a.py::test_other")]
    with pytest.raises(pytest.UsageError, match=r"no test begins with tests/test_a\.py::test_old"):
        levels.require_matches(items)
    levels.require_matches([*items, make_item("tests/test_a.py::test_old[1]")])
    levels.require_matches(items[:1])  # a single test was asked for

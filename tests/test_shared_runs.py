"""Several processes share a run of the tests: long files are taken first, and what takes long to make is made once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.file_order import LONG_FILES, longest_first

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
    import os, pathlib, pytest
    from tests.file_order import FileOrder
    from tests.run_folders import run_folder

    def pytest_configure(config):
        config.pluginmanager.register(FileOrder(config))

    def make(folder):
        folder.mkdir()
        with open("made", "a") as log:
            log.write("made ")

    @pytest.fixture(scope="session")
    def source(request):
        return run_folder(request, "source", make)

    @pytest.fixture(autouse=True)
    def process(source):
        assert source.is_dir()
        pathlib.Path(os.environ["PYTEST_XDIST_WORKER"]).touch()
"""
FILES = {
    "test_a.py": "def test_a(): pass",
    "test_b.py": "import time\ndef test_b1(): pass\ndef test_b2(): time.sleep(0.5)",
    "test_c.py": "import time\ndef test_c(): time.sleep(0.2)",
}


class Item:
    """What `longest_first` reads of a test."""

    def __init__(self, name: str) -> None:
        self.nodeid, self.path = name, Path(name.partition("::")[0])


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with tests of its own."""
    (tmp_path / "conftest.py").write_text("\n".join(line[4:] for line in CONFTEST.splitlines()))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def order(suite: Path, processes: int, *files: str) -> list[str]:
    """Run the suite and return its tests in the order in which they ended."""
    spread = ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]  # as in the Makefile
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "--basetemp", str(suite / "temp"), *spread, *files]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"PASSED .*::(test_\w+)", done.stdout)


def test_processes_make_a_folder_once_a_run_and_the_next_run_takes_the_longest_file_first(suite: Path) -> None:
    assert set(order(suite, 2)) == {"test_a", "test_b1", "test_b2", "test_c"}
    assert {path.name for path in suite.glob("gw*")} == {"gw0", "gw1"}
    assert (suite / "made").read_text() == "made "

    assert order(suite, 1, "test_a.py", "test_b.py") == ["test_b1", "test_b2", "test_a"]
    assert (suite / "made").read_text() == "made made "
    known = json.loads((suite / ".pytest_cache" / "v" / "spard" / "seconds").read_text())
    assert known.keys() == {"test_a.py::test_a", "test_b.py::test_b1", "test_b.py::test_b2", "test_c.py::test_c"}


def test_tests_that_never_ran_stay_in_their_order_after_the_others() -> None:
    a, b1, b2, c = (Item(name) for name in ("a::1", "b::1", "b::2", "c::1"))
    assert longest_first([a, b1, b2, c], {"b::1": 1.0, "b::2": 1.0, "c::1": 1.5}) == [b1, b2, c, a]
    assert longest_first([a, b1, b2, c], {"b::1": 1.0, "b::2": 0.1, "c::1": 1.5}) == [c, b1, b2, a]
    assert longest_first([a, b1, b2, c], {}) == [a, b1, b2, c]


def test_in_a_fresh_checkout_the_files_that_are_known_to_be_long_come_first() -> None:
    short, second, first = (Item(f"{name}::1") for name in ("tests/test_a.py", LONG_FILES[1], LONG_FILES[0]))
    assert longest_first([short, second, first], {}) == [first, second, short]
    assert longest_first([short, second, first], {"tests/test_a.py::1": 1.0}) == [short, first, second]


def test_each_long_file_is_there() -> None:
    assert [name for name in LONG_FILES if not (ROOT / name).is_file()] == []

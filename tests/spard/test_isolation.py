"""Hostile programs in the sandbox: whatever they try, they learn nothing, and the outcome says so bit by bit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from spard.config.run_spec import RunSpec, SuiteSpec
from spard.errors import SandboxUnavailable
from spard.evaluation import scorers
from spard.isolation import sandbox
from tests.spard.hostile import BITS, WORD, prey, program

WAIT_S = 900.0  # a program that runs out of time learns nothing either, and a busy machine must not decide that
IS_SOAK = os.environ.get("SPARD_SOAK") == "1"
STEP = 1 if IS_SOAK else 128
needs_sandbox = pytest.mark.skipif(
    not scorers.can_run_programs(), reason="this kernel or container gives no user namespaces with mounts"
)


@needs_sandbox
def test_programs_read_no_bit_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARD_TEST_SECRET", WORD)
    with prey(tmp_path) as found:
        ways = found.ways()
        bits = {
            name: sum(scorers.passes_tests(program(way, bit), "", WAIT_S) for bit in range(0, BITS, STEP))
            for name, way in ways.items()
        }
    assert bits == dict.fromkeys(ways, 0)


@needs_sandbox
def test_the_programs_would_read_it_where_they_may(tmp_path: Path) -> None:
    with prey(tmp_path) as found:
        scope: dict[str, object] = {}
        for name in ("file", "memory call", "network", "abstract socket"):
            exec(program(found.ways()[name], 7), scope)  # noqa: S102


@needs_sandbox
def test_a_program_sees_the_interpreter_s_library_and_little_else() -> None:
    top = {path.split("/")[1] for path in sandbox.library_paths()} | {"dev"}
    assert scorers.passes_tests("import os", f"assert set(os.listdir('/')) <= {top!r}", WAIT_S)
    assert scorers.passes_tests("import os", "assert sorted(os.listdir('/dev')) == ['null', 'urandom', 'zero']", WAIT_S)
    for path in ("/etc/passwd", "/proc/self/status", "/sys/kernel", str(Path.cwd()), sys.prefix + "/pyvenv.cfg"):
        assert not scorers.passes_tests(f"import os; os.stat({path!r})", "", WAIT_S), path


@needs_sandbox
def test_a_program_has_no_power_in_its_own_namespaces() -> None:
    tried = "import ctypes; assert ctypes.CDLL(None, use_errno=True).{} == 0"
    for call in (
        "unshare(0x10000000)",
        "mount(b'none', b'/dev', b'tmpfs', 0, None)",
        "chroot(b'/dev')",
        "sethostname(b'x', 1)",
        "socket(1, 1, 0)",
        "socket(40, 1, 0)",
        "syscall(425, 1, None)",
        "syscall(250, 0, 0, 0)",
    ):
        assert not scorers.passes_tests(tried.format(call), "", WAIT_S), call


def test_without_namespaces_no_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "can_run_programs", lambda: False)
    with pytest.raises(SandboxUnavailable, match=r"namespaces .* docs/security\.md"):
        scorers.passes_tests("x = 1", "assert x", WAIT_S)


def test_without_namespaces_a_suite_with_programs_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "can_run_programs", lambda: False)
    paths = {}
    for scorer in ("exact", "mbpp"):
        paths[scorer] = tmp_path / f"{scorer}.jsonl"
        paths[scorer].write_text(json.dumps({"prompt": "Write f.", "answer": "assert f", "scorer": scorer}) + "\n")
    run = RunSpec("model", tmp_path / "training.jsonl", suites=(SuiteSpec("plain", "utility", paths["exact"]),))
    scorers.refuse_programs(run)
    with pytest.raises(SandboxUnavailable, match="not at fault"):
        scorers.refuse_programs(replace(run, suites=(SuiteSpec("programs", "utility", paths["mbpp"]),)))


def test_a_package_that_offers_a_judge_is_readable_wherever_its_finder_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "elsewhere" / "their_judges"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "their_judges-1.dist-info").mkdir()
    (tmp_path / "their_judges-1.dist-info" / "METADATA").write_text("Name: their-judges\nVersion: 1\n")
    (tmp_path / "their_judges-1.dist-info" / "entry_points.txt").write_text("[spard.judges]\nx = their_judges:open_x\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    class Finder:  # as setuptools installs one for an editable installation
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, package / "__init__.py") if name == "their_judges" else None

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert str(package) in sandbox._extensions()
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert str(package) not in sandbox._extensions()


def test_packages_are_found_where_an_editable_installation_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(Path(sandbox.__file__).parents[2])
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != own])

    assert sandbox.checkouts() == [own]
    assert {f"{own}/{name}" for name in ("app", "spard", "worker")} <= set(sandbox.program_paths.__wrapped__())

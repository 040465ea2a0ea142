"""`make house`: its counts are right, and what they must not pass."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tools import house
from tools.house import Module, Package, circles, read_package, upward

MAX_TOP_FOLDERS, MAX_TOP_MODULES = 14, 6  # of spard/
MAX_FILE, MAX_FUNCTION = 500, 60  # lines: a file is made for a second importer or reason, not for its length
MAX_LOOSE = 39  # mappings without a form, in app/


@pytest.fixture(scope="module")
def packages() -> list[Package]:
    return [read_package(name) for name in house.PACKAGES]


def test_spard_has_few_rooms_at_its_top(packages: list[Package]) -> None:
    spard = packages[-1]
    assert len(spard.top_folders) <= MAX_TOP_FOLDERS
    assert len(spard.top_modules) <= MAX_TOP_MODULES


def test_no_import_goes_upward_and_no_folders_stand_in_a_circle(packages: list[Package]) -> None:
    assert house.faults(packages) == []


def test_every_room_has_a_layer(packages: list[Package]) -> None:
    for package in packages:
        layers = {room.strip(" ()") for layer in house.declared_layers(package.name) for room in layer.split("|")}
        assert {*package.top_folders, *package.top_modules} - {"__init__", "__main__"} <= layers


def test_the_soak_runs_each_test_that_has_a_longer_version() -> None:
    makefile = (Path(house.__file__).parents[1] / "Makefile").read_text()
    (asked,) = re.findall(r"^LONG := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    run = [place for place in asked.split() if place != "\\"]
    long = [path.as_posix() for path in Path("tests").rglob("test_*.py") if "SPARD_SOAK" in path.read_text()]
    by_clients = {"tests/app/conformance/test_others.py"}  # `make soak` runs `python -m tests.clients` too
    helpers = {"tests/test_surroundings.py", "tests/test_house.py"}  # they name it
    assert [path for path in long if not path.startswith(tuple(run)) and path not in by_clients | helpers] == []


def test_files_and_functions_stay_short(packages: list[Package]) -> None:
    for package in packages:
        assert package.longest_file[0] <= MAX_FILE, package.longest_file
        assert package.longest_function[0] <= MAX_FUNCTION, package.longest_function


def test_a_defense_is_named_in_its_own_files(packages: list[Package]) -> None:
    named = house.files_of_defense(house.DEFENSE, packages)
    assert set(named) - {"spard/config/__init__.py"} == {  # the public names of the configuration
        "spard/config/defenses/safegrad.py",
        "spard/methods/safegrad.py",
    }


def test_circles_are_found_whatever_their_length() -> None:
    arrows = {("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "f"), ("f", "e"), ("d", "f")}
    assert circles(arrows) == [["a", "b", "c"], ["e", "f"]]


def test_imports_against_the_layers_are_found() -> None:
    arrows = {("p.low", "p.top"): {"1"}, ("p.top", "p.low"): {"2"}, ("p.left", "p.right"): {"3"}}
    assert upward(arrows, ["top", "left | right", "low"]) == ["1", "3"]


def test_a_name_counts_where_code_has_it_but_not_in_prose() -> None:
    for code in ("from spard.methods import safegrad", "SafeGrad()", "kind = 'safegrad'", "def f(safegrad): ..."):
        assert house._names(ast.parse(code), "safegrad"), code
    assert not house._names(ast.parse('"""As safegrad does."""\n# safegrad\n'), "safegrad")


def test_few_mappings_of_the_service_have_no_form(packages: list[Package]) -> None:
    app = next(each for each in packages if each.name == "app")
    assert app.loose <= MAX_LOOSE


def test_loose_mappings_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    (tmp_path / "loose.py").write_text("def f(a: dict[str, Any], b: dict[str, int]) -> Mapping[str, Any]: ...\n")
    assert Package("p", [Module(Path("loose.py"))], {}).loose == 2


def test_the_command_prints_its_definitions_and_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([]) == 0
    assert "circle      rooms that import" in capsys.readouterr().out
    assert house.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spard"]["circles"] == []

"""The three distributions: built from this checkout, installed, and used among strangers' packages of the same names.

What they depend on comes from the environment that runs the tests: the wheels are what is tested here, not how an index
resolves their dependencies.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SERVER = ["fastapi", "sqlalchemy", "uvicorn", "openai", "torch", "app.main"]
WITHOUT = "import sys; found = [name for name in {names} if name in sys.modules]; sys.exit(str(found) if found else 0)"


PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def clean() -> dict[str, str]:
    """Our environment without what points Python or the service at this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SPARD_", "PYTHON"))}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by distribution, built from what git tracks; a folder of an earlier build adds nothing."""
    folder = tmp_path_factory.mktemp("wheels")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = folder / "source"
    for name in tracked.decode().split("\0"):
        path = ROOT / name
        if name and path.exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    for project in (source, source / "service", source / "lab"):
        command = [*PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(project)]
        subprocess.run([sys.executable, *command], check=True, env=clean())
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def make_installation(folder: Path, *wheels: Path) -> Path:
    """An environment with these wheels and, behind them, the dependencies of ours; its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    command = [*PIP, "install", "--no-deps", *map(str, wheels)]
    subprocess.run([str(programs / "python"), *command], check=True, env=clean())
    site = next(folder.glob("lib/python*/site-packages"))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("spard", "__")) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return programs


@pytest.fixture(scope="module")
def library(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_installation(tmp_path_factory.mktemp("library"), wheels["spard"])


@pytest.fixture(scope="module")
def service(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_installation(tmp_path_factory.mktemp("service"), wheels["spard"], wheels["spard_service"])


@pytest.fixture(scope="module")
def laboratory(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_installation(tmp_path_factory.mktemp("laboratory"), wheels["spard"], wheels["spard_lab"])


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder with packages of our names; importing one fails."""
    for name in ("app", "worker", "spard", "spard_lab", "migrations"):
        (tmp_path / name).mkdir()
        for module in ("__init__", "__main__"):
            (tmp_path / name / f"{module}.py").write_text("raise SystemExit('a stranger was imported')\n")
    return tmp_path


def run(programs: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    line = [str(programs / command[0]), *command[1:]]
    return subprocess.run(line, cwd=folder, env=clean(), capture_output=True, text=True, check=False)


def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_each_wheel_holds_its_own_packages_and_all_of_its_data(wheels: dict[str, Path]) -> None:
    tops = {name: {path.split("/")[0] for path in wheel_names(wheel)} for name, wheel in wheels.items()}
    assert {name: {top for top in found if "dist-info" not in top} for name, found in tops.items()} == {
        "spard": {"spard"},
        "spard_service": {"app", "worker", "migrations"},
        "spard_lab": {"spard_lab"},
    }
    assert "spard/py.typed" in wheel_names(wheels["spard"])
    of_laboratory = {"py.typed", "bench/page.html.jinja", "bench/recipes/lab.yaml"}
    assert {f"spard_lab/{name}" for name in of_laboratory} <= set(wheel_names(wheels["spard_lab"]))
    of_service = set(wheel_names(wheels["spard_service"]))
    assert {
        "app/help/error_codes.toml",
        "app/help/terms.toml",
        "app/jobs/reports/templates/report.html.jinja",
        "app/jobs/reports/templates/spard.css",
        "migrations/script.py.mako",
    } <= of_service


def test_each_wheel_says_what_it_is(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith("METADATA"))
            facts = Parser().parsestr(archive.read(name).decode())
            (license_text,) = (each for each in archive.namelist() if each.endswith("licenses/LICENSE"))
            assert "Apache License" in archive.read(license_text).decode()
        assert facts["License-Expression"] == "Apache-2.0"
        assert facts["Author"] == "The SPARD authors"
        assert facts.get_all("Classifier")
        assert facts["Summary"]


def test_the_library_asks_for_no_server(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["spard"]) as archive:
        name = next(each for each in archive.namelist() if each.endswith("METADATA"))
        needs = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    plain = {each.split(">")[0].split("=")[0].strip() for each in needs if "extra" not in each}
    assert plain == {"cryptography", "typer"}


def test_the_library_is_imported_without_anything_heavy(library: Path, strangers: Path) -> None:
    code = f"import spard; {WITHOUT.format(names=['torch', 'numpy', 'typer', 'cryptography', 'fastapi'])}"
    assert run(library, strangers, "python", "-P", "-c", code).returncode == 0


def test_the_library_gives_the_projection(library: Path, strangers: Path) -> None:
    names = ["fastapi", "sqlalchemy", "celery", "redis", "uvicorn", "typer"]
    code = f"from spard import SafetyProjection; {WITHOUT.format(names=names)}"
    ended = run(library, strangers, "python", "-P", "-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_library_has_its_own_commands_and_says_its_version(library: Path, strangers: Path) -> None:
    shown = run(library, strangers, "spard", "--help")
    assert shown.returncode == 0
    assert "audit" in shown.stdout
    assert "jobs" not in shown.stdout
    assert run(library, strangers, "spard", "--version").stdout.startswith("spard ")


def test_the_service_adds_its_commands_without_importing_the_server(service: Path, strangers: Path) -> None:
    assert "spard-service " in run(service, strangers, "spard", "--version").stdout
    assert "watch" in run(service, strangers, "spard", "jobs", "--help").stdout
    code = "from spard.commands import main\ntry: main(['jobs', '--help'])\nexcept SystemExit: pass\n"
    code += WITHOUT.format(names=SERVER)
    assert run(service, strangers, "python", "-P", "-c", code).returncode == 0


def test_the_service_starts_among_strangers_packages(service: Path, strangers: Path) -> None:
    command = [str(service / "spard"), "up", "--data", "data", "--port", "0"]
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1] + '/readyz').status)"
    with subprocess.Popen(command, cwd=strangers, env=clean(), stdout=subprocess.PIPE, text=True) as up:
        try:
            assert up.stdout
            address = next(line for line in up.stdout if "http://" in line).split("http://")[1].split("/v1")[0]
            deadline = time.monotonic() + 300
            while run(service, strangers, "python", "-P", "-c", code, f"http://{address}").stdout != "200\n":
                assert up.poll() is None
                assert time.monotonic() < deadline
        finally:
            up.terminate()


def test_the_laboratory_adds_its_commands_and_its_judges(service: Path, laboratory: Path, strangers: Path) -> None:
    asked = "import sys; from spard.config.extensions import JUDGES; sys.exit('lab_truth' not in JUDGES.names())"
    for programs, is_there in ((service, False), (laboratory, True)):
        names = re.findall(r"^\W*([\w-]+)  ", run(programs, strangers, "spard", "--help").stdout, re.MULTILINE)
        assert "verify" in names
        assert [name in names for name in ("bench", "convert", "lab")] == [is_there] * 3
        assert run(programs, strangers, "python", "-P", "-c", asked).returncode == (0 if is_there else 1)
    assert "natural" in run(laboratory, strangers, "spard", "lab", "make", "--help").stdout

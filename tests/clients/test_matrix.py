"""How the matrix judges and tells; `make clients` runs it, and tests/app/conformance what needs no training."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import environments
from tests.clients import report
from tests.clients.matrix import CLIENTS, CONSUMERS, Client, Deviation
from tests.clients.running import SCRIPTS, Outcome, read_outcome

PAGE = (environments.ROOT / "docs" / "clients.md").read_text()


def test_every_client_has_a_name_of_its_own_and_a_script() -> None:
    assert [key for key, times in Counter(each.key for each in (*CLIENTS, *CONSUMERS)).items() if times > 1] == []
    for client in (*CLIENTS, *CONSUMERS):
        assert list(SCRIPTS.glob(f"{client.script}*")), client.script


@pytest.mark.parametrize("client", [*CLIENTS, *CONSUMERS], ids=lambda client: client.key)
def test_the_page_tells_of_the_packages_that_the_matrix_names_and_of_no_failure(client: Client) -> None:
    packages = ", ".join(f"`{each}`" for each in client.packages)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {client.name} | {packages} |")]
    assert "failed" not in row
    for check, deviation in client.deviations.items():
        assert f"| {client.name} | {check} | {deviation.why} |" in PAGE


CLIENT = Client("a", "1", "a", "a", deviations={"argued": Deviation("known", "why"), "mended": Deviation("old", "why")})


def test_an_argument_covers_one_error_and_is_struck_when_it_is_gone() -> None:
    found = Outcome(CLIENT, {"fine": None, "argued": "a known fault", "mended": None, "broken": "fault"})
    assert (found.passed_checks, found.deviating) == (["fine", "mended"], ["argued"])
    assert found.faults == {"broken": "fault", "mended": "passes now: strike the deviation"}
    assert Outcome(CLIENT, {"argued": "another fault"}).faults == {"argued": "another fault"}


def test_a_client_that_cannot_be_installed_is_told_as_not_run(tmp_path: Path) -> None:
    client = CLIENTS[0]
    report.keep(tmp_path / "figures", Outcome(client, {}, "no such package"), with_training=True, with_inference=False)
    page = tmp_path / "page.md"
    page.write_text("# Clients\n")
    report.write(page, tmp_path / "figures")
    assert re.search(rf"^\| {client.name} \| `\S+` \| \| not run: no such package \|$", page.read_text(), re.MULTILINE)
    assert page.read_text().count("not run") == len(CLIENTS) + len(CONSUMERS)


def test_a_script_that_breaks_off_is_no_success() -> None:
    told = subprocess.CompletedProcess([], 1, '{"check": "first", "error": null}\n', "broken")
    assert read_outcome(CLIENT, told).faults == {"runs to its end": "broken"}

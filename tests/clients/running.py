"""A client of the matrix installed, run, and its outcome read: passed, deviates as argued, failed, or not run."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests import environments
from tests.clients.matrix import Client

SCRIPTS = Path(__file__).with_name("scripts")
LIMIT_S = 1800


class Place(Protocol):
    """A service, and what a customer of it holds."""

    @property
    def url(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def admin_key(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def job(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """What became of one client: its checks and their errors, or why it was not run."""

    client: Client
    checks: dict[str, str | None]
    not_run: str | None = None

    @property
    def passed_checks(self) -> list[str]:
        return [check for check, error in self.checks.items() if error is None]

    @property
    def deviating(self) -> list[str]:
        """Checks that fail, and as it is argued."""
        return [check for check in self.client.deviations if self._is_as_argued(check)]

    @property
    def faults(self) -> dict[str, str]:
        """Checks that fail for no argued reason, and arguments that no check bears out any more."""
        failed = {
            check: error for check, error in self.checks.items() if error is not None and not self._is_as_argued(check)
        }
        stale = {
            check: "passes now: strike the deviation"
            for check in self.client.deviations
            if check in self.checks and self.checks[check] is None
        }
        return failed | stale

    def _is_as_argued(self, check: str) -> bool:
        error, argued = self.checks.get(check), self.client.deviations.get(check)
        return error is not None and argued is not None and argued.says in error


def run(client: Client, place: Place, *flags: str) -> Outcome:
    """Install a client where it is not installed yet, and run its script against the service."""
    return _run(client, [place.url, place.key, place.admin_key, str(place.folder), place.job, *flags], place.folder)


def read(client: Client, base: Path, adapter: Path) -> Outcome:
    """The same for a reader of archives, beside the folder of the base model."""
    return _run(client, [str(base), str(adapter)], base.parent)


def _run(client: Client, asked: list[str], folder: Path) -> Outcome:
    try:
        command, needs = _command(client)
    except environments.NotInstalled as error:
        return Outcome(client, {}, str(error))
    return read_outcome(client, _run_script([*command, *asked], needs, folder))


def _command(client: Client) -> tuple[list[str], dict[str, str]]:
    """The beginning of its command line, and what it needs in its environment."""
    if client.runtime == "node":
        node, modules = environments.node(client.key, *client.packages)
        return [str(node), str(SCRIPTS / client.script)], {"NODE_PATH": str(modules)}
    python = environments.python(client.key, *client.packages, torch=client.with_torch)
    return [str(python), "-m", f"tests.clients.scripts.{client.script}"], {"PYTHONPATH": str(environments.ROOT)}


def _run_script(command: list[str], needs: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARD_", "PYTHON"))}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | needs | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def read_outcome(client: Client, done: subprocess.CompletedProcess[str]) -> Outcome:
    """What a script told; that it ended before its time is a failed check too."""
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    checks: dict[str, str | None] = {each["check"]: each["error"] for each in told}
    if done.returncode or not checks:
        checks["runs to its end"] = done.stderr[-3000:]
    return Outcome(client, checks)

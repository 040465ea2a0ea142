"""A client of the matrix installed, run, and its outcome read: passed, deviates as argued, failed, or not run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import environments
from tests.clients.matrix import Client
from tests.clients.service import Desk

SCRIPTS = Path(__file__).with_name("scripts")
LIMIT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """What became of one client: its checks and their errors, or why it was not run."""

    client: Client
    checks: dict[str, str | None]
    not_run: str | None = None

    @property
    def passed(self) -> list[str]:
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


def run(client: Client, desk: Desk, *flags: str) -> Outcome:
    """Install a client where it is not installed yet, and run its script against the service."""
    try:
        command = _command(client)
    except environments.NotInstalled as error:
        return Outcome(client, {}, str(error))
    if client.runtime == "consumer":
        asked, folder = [str(desk.base), str(desk.adapter)], desk.base.parent
    else:
        asked, folder = [desk.url, desk.key, desk.admin_key, str(desk.folder), desk.job, *flags], desk.folder
    return Outcome(client, dict(_checks([*command[0], *asked], command[1], folder)))


def _command(client: Client) -> tuple[list[str], dict[str, str]]:
    """The beginning of its command line, and what it needs in its environment."""
    if client.runtime == "node":
        node, modules = environments.node(client.key, *client.packages)
        return [str(node), str(SCRIPTS / client.script)], {"NODE_PATH": str(modules)}
    python = environments.python(client.key, *client.packages, torch=client.with_torch)
    return [str(python), "-m", f"tests.clients.scripts.{client.script}"], {"PYTHONPATH": str(environments.ROOT)}


def _checks(command: list[str], needs: dict[str, str], folder: Path) -> Iterator[tuple[str, str | None]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARD_", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | needs | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"check"'):
            told = json.loads(line)
            yield told["check"], told["error"]
    if done.returncode:
        yield "runs to its end", done.stdout[-1000:] + done.stderr[-3000:]

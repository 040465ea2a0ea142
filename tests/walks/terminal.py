"""A terminal in a folder of its own: commands run in bash as a person types them, with the installed `spard`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.pathsep.join(str(ROOT / name) for name in ("", "lab"))
LIMIT_S = 3000  # for one command: no bound on speed, on whatever machine


@dataclass
class Terminal:
    """A person at a terminal in an empty folder; `there` replaces what a page leaves the reader to fill in."""

    folder: Path
    there: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARD_")}
        self.environment = kept | {"PATH": programs, "PYTHONPATH": CHECKOUT, "COLUMNS": "120"}

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line in bash and return how it ended, with both outputs in `stdout`."""
        return subprocess.run(
            ["bash", "-c", self.fill(line)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def type(self, line: str, *, status: int = 0) -> str:
        """Run a line, which must exit with this status, and return what it printed, on one line and without frames."""
        if exported := re.match(r"export (.+)", self.fill(line)):
            self.environment |= dict(each.split("=", 1) for each in exported[1].split())
            return ""
        done = self.run(line)
        assert done.returncode == status, f"{line}: {done.returncode}\n{done.stdout}"
        return " ".join(re.sub("[│╭╮╰╯─]", " ", done.stdout).split())

    def ask(self, line: str) -> Any:
        """Run a line with `--json`, and return its answer."""
        done = self.run(f"{line} --json 2>/dev/null")
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}"
        return json.loads(done.stdout)

    def fill(self, text: str) -> str:
        """Return a text with what the reader fills in."""
        for name, value in self.there.items():
            text = text.replace(name, value)
        return text


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def first_key(told: str) -> str:
    """Return the key that the start of a service shows once."""
    found = re.search(r"sk-spard-\S+", told)
    assert found, told
    return found.group()


def sign_in(page: Page, key: str) -> None:
    """Sign in on the pages of a service, and wait for the list of jobs."""
    page.goto("/sign-in")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Sign out").wait_for()

"""The lab that `make demo` leaves, made once for all walks of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.run_folders import run_folder
from tests.walks.terminal import Terminal, free_port


@pytest.fixture
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in a folder with the demo's lab and nothing else. The service that it starts ends with the test."""
    lab = run_folder(request, "demo-lab", lambda folder: Terminal(tmp_path).type(f"spard lab make {folder} --seed 1"))
    here = tmp_path / "here"
    shutil.copytree(lab, here / ".demo" / "lab")
    terminal = Terminal(here, {"8000": str(free_port())})
    yield terminal
    for folder in here.glob("*/up.lock"):
        terminal.run(f"spard down --data {folder.parent}")


@pytest.fixture
def page(browser: Browser, terminal: Terminal) -> Iterator[Page]:
    """A page of the terminal's service that must end without an error on its console."""
    context = browser.new_context(base_url=terminal.fill("http://127.0.0.1:8000"), locale="en-US")
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []

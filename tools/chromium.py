"""The machine's Chromium, headless, driven by Playwright: for pages' tests, pictures and diagrams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Of its own, Chromium asks servers for updates and lists: none is to be reached.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", *_QUIET)


def place() -> str | None:
    """Return where Chromium is, if the machine has one."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Start a Chromium that asks nothing of anybody by itself, and end it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()

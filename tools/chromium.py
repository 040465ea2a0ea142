"""The machine's Chromium, headless, driven by Playwright: for pages' tests, pictures and diagrams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium requests updates and lists by default; these flags prevent any request of its own.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", *_QUIET)


def place() -> str | None:
    """Return the path of Chromium, or None if this machine has none."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Start a Chromium that makes no requests of its own, and end it after the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()

"""The pictures of the documentation: a running service's pages as Chromium draws them.

make demo's service, or any other with a job that succeeded and its undefended twin, then
python -m tools.pictures http://127.0.0.1:8000 --to docs/pictures     with the key in SPARD_API_KEY
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
_WIDE, _PHONE = (1280, 1330), (390, 844)

Scheme = Literal["light", "dark"]


def main() -> int:
    """Sign in, and save a picture of each main page."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="where the service answers")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"))
    asked = parser.parse_args()
    found, key = shutil.which("chromium"), os.environ.get("SPARD_API_KEY")
    if found is None or key is None:
        print("Chromium must be installed, and a key stand in SPARD_API_KEY.", file=sys.stderr)
        return 1
    asked.to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(_ARGUMENTS))
        job = _defended_job(_signed_in(browser, asked.url, key, "light", _WIDE))
        for scheme, size, name in (("light", _WIDE, "light"), ("dark", _WIDE, "dark"), ("light", _PHONE, "phone")):
            page = _signed_in(browser, asked.url, key, scheme, size)  # type: ignore[arg-type]
            _save(page, job, asked.to / f"job-{name}.png")
        page = _signed_in(browser, asked.url, key, "light", _WIDE)
        _save(page, "/jobs", asked.to / "jobs.png", height=620)
        page.goto(job)
        for part in ("scores", "data"):
            page.locator(f"#{part}").screenshot(path=asked.to / f"job-{part}.png")
        browser.close()
    return 0


def _signed_in(browser: Browser, url: str, key: str, scheme: Scheme, size: tuple[int, int]) -> Page:
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_context(base_url=url, color_scheme=scheme, viewport=viewport).new_page()  # type: ignore[arg-type]
    page.goto("/sign-in")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    return page


def _defended_job(page: Page) -> str:
    """Return the address of the newest job that was defended and succeeded."""
    page.goto("/jobs?status=succeeded")
    row = page.locator("tbody tr").filter(has=page.get_by_role("cell", name="spard", exact=True)).first
    return str(row.get_by_role("link").first.get_attribute("href"))


def _save(page: Page, path: str, file: Path, height: int | None = None) -> None:
    page.goto(path)
    size = page.viewport_size or {"width": _WIDE[0], "height": _WIDE[1]}
    page.set_viewport_size({"width": size["width"], "height": height or size["height"]})
    page.screenshot(path=file)


if __name__ == "__main__":
    raise SystemExit(main())

"""Publishes the documentation for programs: `llms.txt`, and each page as Markdown beside the site's HTML.

The format is that of https://llmstxt.org: a title, a summary, and sections of links, each with a line about its target.
The order is that of `nav` in mkdocs.yml. The hook tools/site_pages.py calls `write` when the site is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the repository's root
FIRST = "agents.md"  # linked in the summary: the calls from a training file to an answer
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r".+?[.:?](?=\s|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of the navigation: its section, its title there, and its file under `docs/`."""

    section: str
    title: str
    name: str

    @property
    def path(self) -> Path:
        """The page's path in the repository."""
        return ROOT / self.name if self.name in BESIDE else ROOT / "docs" / self.name

    def line(self) -> str:
        """Return the page's line in `llms.txt`."""
        about = summary(self.path.read_text(encoding="utf-8"))
        return f"- [{self.title or title(self.path)}]({self.name})" + (f": {about}" if about else "")


def pages() -> list[Listed]:
    """Return all pages, in the order of the navigation."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [page for entry in nav for page in _list_entries("Start", entry)]


def summary(text: str) -> str:
    """Return the first sentence of a page without links; "" if the page has no paragraph."""
    for part in text.split("\n\n"):
        if part[:1].isalpha() or part[:1] in ("`", "["):
            words = " ".join(_LINK.sub(r"\1", part).split())
            found = _SENTENCE.match(words)
            return found.group() if found else words
    return ""


def title(path: Path) -> str:
    """Return the first heading of a page."""
    return next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:]


def llms_txt() -> str:
    """Return the text of `llms.txt`."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}.", ""]
    lines += [f"The calls from a training file to an answer of the tuned model are in [{FIRST}]({FIRST}).", ""]
    section = ""
    for page in pages():
        if page.section != section:
            lines += [*([""] if section else []), f"## {page.section}", ""]
            section = page.section
        lines.append(page.line())
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Write `llms.txt` and each page as Markdown into a folder, with working links between pages."""
    (folder / "llms.txt").write_text(llms_txt(), encoding="utf-8")
    for page in pages():
        target = folder / page.name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.path.read_text(encoding="utf-8")
        if page.name in BESIDE:
            text = text.replace("](docs/", "](")
        else:
            text = re.sub(rf"\]\((?:\.\./)+({'|'.join(map(re.escape, BESIDE))})", _up(page.name), text)
        target.write_text(text, encoding="utf-8")


def _up(name: str) -> str:
    return "](" + "../" * name.count("/") + r"\1"


def _list_entries(section: str, entry: Any) -> Iterator[Listed]:
    if isinstance(entry, str):
        yield Listed(section, "", entry)
        return
    for name, below in entry.items():
        if isinstance(below, str):
            yield Listed(section, name, below)
        else:
            for each in below:
                yield from _list_entries(section if section != "Start" else name, each)

"""Publishes the documentation for programs: `llms.txt`, and each page as Markdown beside the site's HTML.

The format is that of https://llmstxt.org: a title, a summary, and sections of links, each with a line about its target.
The order is that of `nav` in mkdocs.yml. The hook tools/site_pages.py calls `write` when the site is built.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the repository's root
_FOLDERS = {"lab/": Path("lab/docs"), "": Path("docs")}  # where the pages under a prefix of the site lie
FIRST = "agents.md"  # named in the summary: the calls from a file to an answer
_TARGET = re.compile(r"(\]\()([^)\s#]+)")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r".+?[.:?](?=\s|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SitePage:
    """A page of the navigation: its section, its title there, and its name in the site."""

    section: str
    title: str
    name: str

    @property
    def path(self) -> Path:
        """The page's path in the repository."""
        return ROOT / source(self.name)

    def line(self) -> str:
        """Return the page's line in `llms.txt`."""
        about = summary(self.path.read_text(encoding="utf-8"))
        return f"- [{self.title or title(self.path)}]({self.name})" + (f": {about}" if about else "")


def pages() -> list[SitePage]:
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
        target.write_text(relink(page.path.read_text(encoding="utf-8"), page.name), encoding="utf-8")


def source(name: str) -> Path:
    """Return where a page of the site lies, from the root of the repository."""
    if name in BESIDE:
        return Path(name)
    prefix = next(each for each in _FOLDERS if name.startswith(each))
    return _FOLDERS[prefix] / name.removeprefix(prefix)


def relink(text: str, name: str) -> str:
    """Return a page's text with links that hold in the site, where pages of several folders lie in one."""
    return _TARGET.sub(lambda found: found[1] + _link(found[2], name), text)


def _link(target: str, name: str) -> str:
    """Return a link's target as seen from a page of the site; unchanged where it leads to no page or picture of it."""
    lies = os.path.normpath(source(name).parent / target)
    in_site = lies if lies in BESIDE else _site_name(Path(lies))
    if re.match(r"[a-z]+:", target) or in_site is None:
        return target
    return os.path.relpath(in_site, Path(name).parent)


def _site_name(path: Path) -> str | None:
    for prefix, folder in _FOLDERS.items():
        if path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return None


def _list_entries(section: str, entry: Any) -> Iterator[SitePage]:
    if isinstance(entry, str):
        yield SitePage(section, "", entry)
        return
    for name, below in entry.items():
        if isinstance(below, str):
            yield SitePage(section, name, below)
        else:
            for each in below:
                yield from _list_entries(section if section != "Start" else name, each)

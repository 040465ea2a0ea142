"""Draws the documentation's diagrams from the Mermaid text in its pages, which GitHub renders by itself.

python -m tools.diagrams FOLDER/package/dist/mermaid.min.js     after npm pack mermaid@12.3.0, unpacked into FOLDER

A picture contains the digest of its text, and its colors are variables that the site sets for light and dark.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from playwright.sync_api import Page

from tools.chromium import chromium, place

DOCS = Path(__file__).resolve().parents[1] / "docs"
MERMAID = "336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3"  # mermaid.min.js of 12.3.0, by MIT license
_FENCED = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)
_STYLE = """
.node rect, .node path, .node polygon, .node circle, .node ellipse, .label-container, .label-container path
  { fill: var(--diagram-box, #fff) !important; stroke: var(--diagram-line, #6b7280) !important;
  filter: none !important }
.node.statediagram-state rect { rx: 5px; ry: 5px }
.cluster rect { fill: var(--diagram-group, #f4f5f7) !important; stroke: var(--diagram-line, #6b7280) !important;
  filter: none !important }
.node circle.state-start { fill: var(--diagram-ink, #16181d) !important }
.edgePath path, .flowchart-link, .transition, .edge-thickness-normal
  { stroke: var(--diagram-line, #6b7280) !important }
marker path { fill: var(--diagram-line, #6b7280) !important; stroke: var(--diagram-line, #6b7280) !important }
text, tspan, .nodeLabel, .edgeLabel { fill: var(--diagram-ink, #16181d) !important }
.edgeLabel rect, .edgeLabel .background, .labelBkg
  { fill: var(--diagram-paper, #fff) !important; opacity: 0.9 !important }
"""
_SETTINGS = {
    "startOnLoad": False,
    "securityLevel": "strict",
    "theme": "base",
    "themeCSS": _STYLE,
    "htmlLabels": False,
    "fontFamily": "system-ui, sans-serif",
    "themeVariables": {"fontSize": "14px"},
}


@dataclass(frozen=True)
class Diagram:
    """One Mermaid block of a page; `title` is its `accTitle`, after which its picture is named."""

    title: str
    text: str

    @property
    def file(self) -> Path:
        """The path of its picture."""
        return DOCS / "pictures" / f"{re.sub('[^a-z]+', '-', self.title.lower())}.svg"

    @property
    def digest(self) -> str:
        """The digest of the text, stored in the picture to detect changes."""
        return sha256(self.text.encode()).hexdigest()


def diagrams() -> list[Diagram]:
    """Return the diagrams of all pages."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    return [_read(text) for page in pages for text in _FENCED.findall(page)]


def with_pictures(markdown: str) -> str:
    """Return a page with each Mermaid block replaced by its inline picture, which takes the page's colors."""
    return _FENCED.sub(lambda block: f'<figure class="diagram" tabindex="0">{_shown_text(block[1])}</figure>', markdown)


def _shown_text(text: str) -> str:
    return _read(text).file.read_text(encoding="utf-8")


def _read(text: str) -> Diagram:
    title = _TITLE.search(text)
    if title is None:
        raise ValueError(f"A diagram needs a line `accTitle: ...`: {text[:40]!r}")
    return Diagram(title[1], text)


def _draw(page: Page, diagram: Diagram) -> str:
    """Return a diagram as SVG on one line."""
    asked = [diagram.file.stem, diagram.text]
    drawn = page.evaluate("([id, text]) => mermaid.render(id, text).then(it => it.svg)", asked)
    svg = " ".join(str(drawn).split())
    return svg.replace("<svg ", f'<svg data-text="{diagram.digest}" ', 1) + "\n"


def main() -> int:
    """Draw all diagrams."""
    parser = argparse.ArgumentParser(prog="python -m tools.diagrams", description=__doc__.splitlines()[0])
    parser.add_argument("mermaid", type=Path, help="mermaid.min.js, of the version above")
    mermaid, found = parser.parse_args().mermaid, place()
    if found is None or sha256(mermaid.read_bytes()).hexdigest() != MERMAID:
        print("Chromium must be installed, and the file be that of the version above.", file=sys.stderr)
        return 1
    with chromium(found) as browser:
        page = browser.new_page()
        page.add_script_tag(path=mermaid)
        page.evaluate("settings => mermaid.initialize(settings)", _SETTINGS)
        for diagram in diagrams():
            diagram.file.write_text(_draw(page, diagram), encoding="utf-8")
            print(diagram.file.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The blocks of code in the documents, and which of them are marked as not run.

A comment `<!-- not run: REASON -->` marks the block after it; `<!-- no block of this page is run: REASON -->` all of a
page. ```text and ```mermaid are no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"(?:<!-- not run: ([^\n]+) -->\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WHOLE_PAGE = re.compile(r"<!-- no block of this page is run: ([^\n]+) -->")
INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+")
_PICTURES = {"text", "mermaid"}


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` says why it is not run."""

    page: str
    kind: str
    text: str
    reason: str | None


def pages() -> list[str]:
    """The documents for people, by their paths."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "service" / "README.md"]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of code of a document, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    whole = WHOLE_PAGE.search(text)
    for reason, kind, body in FENCED.findall(text):
        if kind not in _PICTURES:
            yield Block(page, kind, body, reason or (whole[1] if whole else None))


def to_run(page: str, *kinds: str) -> list[Block]:
    """Return the blocks of a document that are not marked, of these kinds."""
    return [block for block in blocks(page) if block.reason is None and block.kind in kinds]


def indented_blocks(page: str) -> list[str]:
    """Return the blocks of a document that are set off by spaces, which nothing can mark."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [] if WHOLE_PAGE.search(text) else INDENTED.findall(FENCED.sub("", text))

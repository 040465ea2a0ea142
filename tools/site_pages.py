"""A hook of mkdocs.yml: adds pages from beside `docs/` to the site, and adapts the links to them.

make docs
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import llms
from tools.diagrams import with_pictures
from tools.llms import BESIDE

ROOT = Path(__file__).resolve().parents[1]
_TO_DOCS = re.compile(r"(\]\()docs/")
_TO_ROOT = re.compile(rf"(\]\()(?:\.\./)+({'|'.join(map(re.escape, BESIDE))})")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from beside `docs/`, with their links adapted to the site."""
    for name in BESIDE:
        text = _TO_DOCS.sub(r"\1", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt links to those pages, and inline the diagrams' pictures instead of loading Mermaid from a CDN."""
    up = "../" * page.file.src_uri.count("/")
    return with_pictures(_TO_ROOT.sub(rf"\1{up}\2", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt` and each page as Markdown beside the HTML."""
    llms.write(Path(config.site_dir))

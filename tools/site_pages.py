"""The documentation's site: pages that lie outside `docs/`, and links to them. mkdocs.yml names this file as a hook.

make docs
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import llms
from tools.diagrams import with_pictures
from tools.llms import BESIDE

LAB = "lab/"  # the prefix of the laboratory's pages in the site
_LAB_DOCS = llms.ROOT / "lab" / "docs"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in `docs/`: those of the repository's root, and the laboratory's."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=(llms.ROOT / name).read_text(encoding="utf-8")))
    for path in sorted(each for each in _LAB_DOCS.rglob("*") if each.is_file()):
        name = LAB + path.relative_to(_LAB_DOCS).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the page's links to the site, and inline the diagrams' pictures instead of loading Mermaid from a CDN."""
    return with_pictures(llms.relink(markdown, page.file.src_uri))


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt` and each page as Markdown beside the HTML."""
    llms.write(Path(config.site_dir))

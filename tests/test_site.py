"""The documentation as a site: it builds without a warning, has all pages, and reads and searches without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tools import diagrams, figures

ROOT = Path(__file__).resolve().parents[1]
LOADED = re.compile(r"""<(?:script|img|link|source|iframe)[^>]+(?:src|srcset|href)=["']?(https?:[^"'\s>]+)""")
IMPORTED = re.compile(r"""(?:url\(|@import)\s*["']?(https?:[^"')\s]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """A new page needs one line of `nav` in mkdocs.yml, else the strict build fails; this names it."""
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set()
    front = (site / "index.html").read_text()
    targets = {name.replace("adr/README.md", "adr/index.md").replace(".md", ".html") for name in listed}
    assert {target for target in targets if f'href="{target}"' not in front} == set()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [path.read_text() for path in site.rglob("*.html")]
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert len(pages) > 40
    assert [place for text in pages for place in LOADED.findall(text)] == []
    assert [place for text in [*pages, *styles] for place in IMPORTED.findall(text)] == []


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    yield page
    page.close()


def test_it_reads_and_searches_from_a_folder(site: Path, page: Page) -> None:
    asked, complaints = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))

    page.goto(f"file://{site}/index.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})
    page.get_by_placeholder("Search").click()
    page.keyboard.type("train_audit_overlap")
    page.locator(".md-search-result__link[href*='error-codes']").first.wait_for()

    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert complaints == []


def test_no_page_is_wider_than_a_phone(site: Path, page: Page) -> None:
    """What is wider scrolls in its own place."""
    wide: dict[str, int] = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        wide |= {file.relative_to(site).as_posix(): width} if width > 390 else {}
    assert wide == {}


def test_diagrams_are_pictures_in_the_scheme_s_colors(site: Path, browser: Browser) -> None:
    page = (site / "architecture.html").read_text()
    assert page.count('<figure class="diagram"') == 2
    assert "flowchart TD" not in page
    inks = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        shown = context.new_page()
        shown.goto(f"file://{site}/architecture.html")
        label = shown.locator(".diagram").first.get_by_text("app/routes")
        inks.append(label.evaluate("it => getComputedStyle(it).fill"))
        context.close()
    assert inks == ["rgb(22, 24, 29)", "rgb(230, 231, 234)"]


@pytest.mark.parametrize("diagram", diagrams.diagrams(), ids=lambda diagram: diagram.file.stem)
def test_a_diagram_s_picture_is_of_the_text_that_stands_in_its_page(diagram: diagrams.Diagram) -> None:
    assert diagram.digest in diagram.file.read_text(), "run python -m tools.diagrams"


def test_a_diagram_without_a_title_is_refused() -> None:
    with pytest.raises(ValueError, match="accTitle"):
        diagrams.with_pictures("```mermaid\nflowchart TD\n  A --> B\n```\n")


def test_the_code_of_others_has_its_license() -> None:
    assert "MIT License" in (ROOT / "docs" / "assets" / "iframe-worker.js").read_text().splitlines()[0]


@pytest.mark.parametrize("drawing", figures.DRAWINGS, ids=lambda drawing: drawing.name)
def test_a_figure_is_of_the_table_that_stands_in_the_results(drawing: figures.Drawing) -> None:
    file = ROOT / "docs" / "pictures" / f"{drawing.name}.svg"
    assert figures.digest(drawing) in file.read_text(), "run python -m tools.figures"
    assert len(figures.draw(drawing).axes) == len(drawing.columns)

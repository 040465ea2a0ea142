"""What a bench shows: one HTML file that loads nothing, the tables as Markdown, and each figure as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from spard_lab.bench.report import Table, machine, results_md
from spard_lab.bench.store import write_aside

_TEMPLATES = Environment(loader=PackageLoader("spard_lab.bench", ""), autoescape=True, undefined=StrictUndefined)


def page(
    title: str, facts: str, figures: Mapping[str, str], tables: Mapping[str, Table], where: str | None = None
) -> str:
    """Render figures (our own SVG by caption) first, then the tables by heading; every other text is escaped.

    The figures are of this machine unless another is named.
    """
    template = _TEMPLATES.get_template("page.html.jinja")
    return template.render(title=title, facts=facts, machine=where or machine(), figures=figures, tables=tables)


def write_page(
    folder: Path,
    name: str,
    title: str,
    facts: str,
    figures: Mapping[str, str],
    tables: Mapping[str, Table],
    where: str | None = None,
) -> str:
    """Write results.md, index.html and plots/NAME-1.svg and so on, as `page` takes them; return the Markdown."""
    text = results_md(title, facts, tables, where)
    write_aside(folder / "results.md", text)
    for number, svg in enumerate(figures.values(), start=1):
        on_white = svg.replace("<svg ", '<svg style="background: white" ', 1)  # whoever shows the file may be dark
        write_aside(folder / "plots" / f"{name}-{number}.svg", on_white)
    write_aside(folder / "index.html", page(title, facts, figures, tables, where))
    return text

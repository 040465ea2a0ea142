"""Write the pages of a bench: one HTML file that loads nothing, the tables as Markdown, and each figure as a file."""

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
    """Return the HTML page with figures (our own SVG by caption), then tables by heading; all other text is escaped.

    `where` names the machine of the measurements; None is this machine.
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
    """Write results.md, index.html and plots/NAME-1.svg and so on; return the Markdown.

    The arguments are those of `page`.
    """
    text = results_md(title, facts, tables, where)
    write_aside(folder / "results.md", text)
    for number, svg in enumerate(figures.values(), start=1):
        on_white = svg.replace("<svg ", '<svg style="background: white" ', 1)  # a viewer's page may be dark
        write_aside(folder / "plots" / f"{name}-{number}.svg", on_white)
    write_aside(folder / "index.html", page(title, facts, figures, tables, where))
    return text

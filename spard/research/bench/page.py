"""One HTML file with a bench's figures and tables; it loads nothing and can be sent by mail."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from spard.research.bench.report import Table, machine

_TEMPLATES = Environment(loader=PackageLoader("spard.research.bench", ""), autoescape=True, undefined=StrictUndefined)


def page(
    title: str, facts: str, figures: Mapping[str, str], tables: Mapping[str, Table], where: str | None = None
) -> str:
    """Render figures (our own SVG by caption) first, then the tables by heading; every other text is escaped.

    The figures are of this machine unless another is named.
    """
    template = _TEMPLATES.get_template("page.html.jinja")
    return template.render(title=title, facts=facts, machine=where or machine(), figures=figures, tables=tables)

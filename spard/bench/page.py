"""One HTML file with a bench's figures and tables; it loads nothing and can be sent by mail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from spard.bench.report import Table, machine

STYLE = """
:root { color-scheme: light; --ink: #1f2937; --soft: #5b6472; --line: #e3e6ea; --paper: #ffffff; --wash: #f6f7f9; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--wash); margin: 0; }
main { max-width: 1100px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
p { color: var(--soft); margin: .25rem 0; max-width: 46rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; }
figure { margin: 0; } figure + figure { margin-top: 1.5rem; } figcaption { color: var(--soft); margin-bottom: .4rem; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } tbody tr:hover { background: var(--wash); }
"""


def page(title: str, facts: str, figures: Mapping[str, str], tables: Mapping[str, Table]) -> str:
    """Figures (SVG by caption) first, then the tables by heading."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>", f"<p>Measured on {escape(machine())}.</p>"]
    if figures:
        drawn = "".join(
            f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in figures.items()
        )
        parts.append(f"<h2>Figures</h2><section>{drawn}</section>")
    for heading, (head, rows) in tables.items():
        parts.append(f'<h2>{escape(heading)}</h2><section class="scroll">{_table(head, rows)}</section>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(each.replace('_', ' '))}</th>" for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"

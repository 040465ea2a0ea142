"""The safety report as a page for people: self-contained, for light and dark, and every text of others escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from app.jobs.plots import Interval, Series, intervals, lines
from app.models import Job

# No script and no request, whatever a text in the report may try.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_MEANS = {
    "harmful": ("Attacks that succeeded", "the lower the better"),
    "mined": ("Attacks in the dress of the training rows that succeeded", "no higher than for the base"),
    "benign": ("Harmless requests refused", "the lower the better"),
    "utility": ("Right answers", "the higher the better"),
}
_PLOTTED = (
    ("loss/task", "Loss on your data", "task"),
    ("loss/safe", "Loss on safe examples", "safe"),
    ("spag/alpha", "Size of the safety step", "safe"),
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --paper: #fff; --card: #f7f9fb;
  --base: #8a94a3; --adapter: #1769aa; --task: #1769aa; --safe: #b4540a; --good: #1a7f4b; --bad: #b3261e;
  --doubt: #8a6100 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --soft: #9fabba; --line: #2d3743; --paper: #12171d;
  --card: #1a2129; --base: #8d99a8; --adapter: #6cb6f2; --task: #6cb6f2; --safe: #f2a35e; --good: #5fce94;
  --bad: #ff8a80; --doubt: #f0c674 } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 46rem; margin: 0 auto; padding: 2.5rem 1.25rem }
h1 { font-size: 1.6rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2.25rem 0 .25rem }
p { margin: .25rem 0 } .soft { color: var(--soft); font-size: .9rem }
code { font-size: .9em; overflow-wrap: anywhere }
.gate { display: inline-block; padding: .2rem .8rem; border-radius: 1rem; font-weight: 600; color: var(--paper) }
.pass { background: var(--good) } .fail { background: var(--bad) } .doubt { background: var(--doubt) }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem;
  margin: .75rem 0 }
svg { width: 100%; height: auto; margin-top: .5rem } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.grid { stroke: var(--line) } polyline { fill: none; stroke-width: 2 } .bar { stroke-width: 4; stroke-linecap: round }
.limit { stroke: var(--soft); stroke-dasharray: 5 4 }
line.base { stroke: var(--base) } circle.base { fill: var(--base) }
line.adapter { stroke: var(--adapter) } circle.adapter { fill: var(--adapter) }
.task { stroke: var(--task); color: var(--task) } .safe { stroke: var(--safe); color: var(--safe) }
table { border-collapse: collapse; width: 100%; font-size: .92rem; margin-top: .5rem }
td, th { text-align: right; padding: .3rem .5rem; border-top: 1px solid var(--line);
  font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } th { color: var(--soft); font-weight: 500; border-top: 0 }
"""

Row = Mapping[str, Any]


def page(job: Job, report: Row, metrics: Sequence[Row]) -> str:
    """The whole document."""
    body = [_head(job, report), _suites(report), _curves(report, metrics), _facts(job, report)]
    title = f"Safety report of {escape(job.id)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>"
    )


def _head(job: Job, report: Row) -> str:
    gate = report.get("gate") or {}
    decision = str(gate.get("decision", "unknown"))
    look = {"pass": "pass", "fail": "fail"}.get(decision, "doubt")
    reasons = "".join(f"<li>{escape(str(reason))}</li>" for reason in gate.get("reasons") or [])
    return (
        f"<h1>Safety report</h1><p class=soft><code>{escape(job.id)}</code> on <code>{escape(job.model)}</code></p>"
        f'<p><span class="gate {look}">Gate: {escape(decision)}</span></p>'
        f"{f'<ul>{reasons}</ul>' if reasons else ''}"
    )


def _suites(report: Row) -> str:
    base = {row["suite"]: row for row in report.get("base") or []}
    found = []
    for row in report.get("adapter") or []:
        means, better = _MEANS.get(row["kind"], (row["kind"], ""))
        both = [(name, each) for name, each in (("base", base.get(row["suite"])), ("adapter", row)) if each]
        bars = [Interval(n, n, each["rate"], each["low"], each["high"]) for n, each in both if each["rate"] is not None]
        name = escape(str(row["suite"]))
        found.append(
            f"<section><strong>{name}</strong> <span class=soft>{escape(means)}: {escape(better)}</span>"
            f"{intervals(means, bars) if bars else ''}{_figures(both)}</section>"
        )
    legend = "<p class=soft>Shares of scored replies with their 95 % Wilson intervals, judged after training.</p>"
    return f"<h2>What was measured</h2>{legend}{''.join(found) or '<p>Nothing was measured.</p>'}"


def _figures(both: Sequence[tuple[str, Row]]) -> str:
    heads = ("model", "hits", "scored", "unscored", "95 % interval", "mean harmfulness")
    rows = "".join(_line(name, each) for name, each in both)
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"


def _line(name: str, row: Row) -> str:
    interval = f"{row['low']:.1%} to {row['high']:.1%}" if row["n"] else "-"
    harm = row.get("mean_harmfulness")
    cells = [name, row["hits"], row["n"], row["unscored"], interval, "-" if harm is None else f"{harm:.2f}"]
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"


def _curves(report: Row, metrics: Sequence[Row]) -> str:
    tau = report.get("tau")
    tau = float(tau) if isinstance(tau, int | float) else None
    task, safe, alpha = (_series(metrics, *each) for each in _PLOTTED)
    if not task.points:
        return ""
    parts = [
        f"<section><strong>Loss on your data</strong>{lines('Loss on your data', [task])}</section>",
    ]
    if safe.points:
        bound = "" if tau is None else f" <span class=soft>bound tau = {tau:.3g} (dashed)</span>"
        parts.append(f"<section><strong>Loss on safe examples</strong>{bound}{lines(safe.name, [safe], tau)}</section>")
    if alpha.points:
        parts.append(f"<section><strong>Size of the safety step</strong>{lines(alpha.name, [alpha])}</section>")
    return f"<h2>Training</h2>{''.join(parts)}"


def _series(metrics: Sequence[Row], key: str, name: str, kind: str) -> Series:
    return Series(name, kind, [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)])


def _facts(job: Job, report: Row) -> str:
    selected = report.get("selected") or {}
    rate = report.get("trigger_rate")
    start = job.spec.get("start_from")
    facts = ({"Started from": start["model"]} if start else {}) | {
        "Defence": job.recipe["defense"]["type"],
        "Safe examples selected": len(selected["indices"]) if selected else "-",
        "Safety checks that led to a correction": "-" if rate is None else f"{rate:.1%}",
        "Tokens trained": report.get("trained_tokens", "-"),
        "Seed": job.recipe["seed"],
        "Base model's digest": report.get("base_digest", "-"),
    }
    rows = "".join(f"<tr><td>{name}</td><td><code>{escape(str(fact))}</code></td></tr>" for name, fact in facts.items())
    return f"<h2>The run</h2><section><table>{rows}</table></section>"

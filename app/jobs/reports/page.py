"""The safety report as a page for people: self-contained, for light and dark, and every text of others escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from app.db.tables import Job
from app.jobs.reports.plots import Interval, Plot, Series, intervals, lines

# No script and no request, whatever a text in the report may try.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_MEANS = {
    "harmful": ("Attacks that succeeded", "the lower the better"),
    "mined": ("Attacks asked in other ways that succeeded", "no higher than for the base"),
    "dressed_benign": ("Harmless requests in the training rows' dresses refused", "no higher than for the base"),
    "benign": ("Harmless requests refused", "the lower the better"),
    "utility": ("Right answers", "the higher the better"),
}
_LOOKS = {"pass": "pass", "fail": "fail"}
_TEMPLATES = Environment(loader=PackageLoader("app.jobs.reports", ""), autoescape=True, undefined=StrictUndefined)

Row = Mapping[str, Any]


def page(job: Job, report: Row, metrics: Sequence[Row]) -> str:
    """Render the report of a job with its training metrics as one HTML document."""
    gate = report.get("gate") or {}
    decision = str(gate.get("decision", "unknown"))
    return _TEMPLATES.get_template("report.html.jinja").render(
        job_id=job.id,
        model=job.model,
        decision=decision,
        look=_LOOKS.get(decision, "doubt"),
        reasons=gate.get("reasons") or [],
        asked=report.get("asked") or [],
        suites=list(_suites(report)),
        curves=list(_curves(report, metrics)),
        facts=_facts(job, report),
    )


def _suites(report: Row) -> Iterator[Row]:
    base = {row["suite"]: row for row in report.get("base") or []}
    for row in report.get("adapter") or []:
        means, better = _MEANS.get(row["kind"], (row["kind"], ""))
        both = [(name, each) for name, each in (("base", base.get(row["suite"])), ("adapter", row)) if each]
        bars = [Interval(n, n, each["rate"], each["low"], each["high"]) for n, each in both if each["rate"] is not None]
        yield {
            "name": row["suite"],
            "means": means,
            "better": better,
            "plot": intervals(means, bars) if bars else None,
            "rows": [_cells(name, each) for name, each in both],
        }


def _cells(name: str, row: Row) -> list[Any]:
    interval = f"{row['low']:.1%} to {row['high']:.1%}" if row["n"] else "-"
    harm = row.get("mean_harmfulness")
    return [name, row["hits"], row["n"], row["unscored"], interval, "-" if harm is None else f"{harm:.2f}"]


def _curves(report: Row, metrics: Sequence[Row]) -> Iterator[Plot]:
    """Plot the losses and the size of the safety step, as far as they were recorded."""
    tau = report.get("tau")
    tau = tau.get("mean") if isinstance(tau, Mapping) else tau  # by the name of the loss, or one for all
    bound = "" if tau is None else f"bound tau = {tau:.3g} (dashed)"
    task = _series(metrics, "loss/task", "Loss on your data", "task")
    safe = _series(metrics, "loss/safe", "Loss on safe examples", "safe")
    alpha = _series(metrics, "spag/alpha", "Size of the safety step", "safe")
    if task.points:
        yield lines(task)
        if safe.points:
            yield lines(safe, tau, bound)
        if alpha.points:
            yield lines(alpha)


def _series(metrics: Sequence[Row], key: str, name: str, kind: str) -> Series:
    return Series(name, kind, [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)])


def _facts(job: Job, report: Row) -> Row:
    selected = report.get("selected") or {}
    rate = report.get("trigger_rate")
    start = job.spec.start_from
    return ({"Started from": start.model} if start else {}) | {
        "Defense": job.recipe["defense"]["type"],
        "Safe examples selected": len(selected["indices"]) if selected else "-",
        "Safety checks that led to a correction": "-" if rate is None else f"{rate:.1%}",
        "Tokens trained": report.get("trained_tokens", "-"),
        "Seed": job.recipe["seed"],
        "Audited by version": report.get("audit_version", 1),
        "Base model's digest": report.get("base_digest", "-"),
    }

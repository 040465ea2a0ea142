"""Render the safety report as one self-contained HTML file; untrusted text is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from app.jobs.reports.gather import Seen
from app.jobs.schemas import JobOut
from spard.release.report import SafetyReport

# Browsers run no script and send no request, whatever a text in the report contains.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
TEMPLATES = PackageLoader("app.jobs.reports", "templates")
_TEMPLATES = Environment(loader=TEMPLATES, autoescape=True, undefined=StrictUndefined)
_QUOTED = re.compile("`([^`\n]+)`")


def with_code(text: str) -> Markup:
    """Escape a text, and show what is between backticks as code."""
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - it is escaped


_TEMPLATES.filters["with_code"] = with_code


def page(seen: Seen) -> str:
    """Render the report and training metrics of a job as one HTML document."""
    facts = _facts(seen.job, seen.report) if seen.report else {}
    return _TEMPLATES.get_template("report.html.jinja").render(
        job=seen.job, view=seen.view(), facts=facts, findings=seen.found.findings
    )


def _facts(job: JobOut, report: SafetyReport) -> Mapping[str, str | int]:
    rate, chosen = report.trigger_rate, report.selected
    lineage = job.safety["lineage"]
    return ({"Started from": job.model} if lineage else {}) | {
        "Job": job.id,
        "Model": job.fine_tuned_model or "not released",
        "Base model": report.base_model or job.model,
        "Base model's digest": report.base_digest or "-",
        "Defense": job.safety["defense"]["type"],
        "Safe examples chosen": len(chosen.indices) if chosen else "-",
        "Safety checks that led to a correction": "-" if rate is None else f"{rate:.1%}",
        "Tokens trained": f"{report.trained_tokens:,}" if report.trained_tokens is not None else "-",
        "Seed": job.seed,
        "Audited by version": report.audit_version,
        "Auditing agent": report.agent.sentence() if report.agent else "none",
        "Finished": f"{job.finished_at:%Y-%m-%d %H:%M} UTC" if job.finished_at else "-",
    }

"""Locate the gate's limits on the scale of a report's figures."""

from __future__ import annotations

from collections.abc import Iterator

from app.jobs.reports.counts import count_kind
from app.jobs.reports.plots import percent
from spard.config import ON_FIGURES
from spard.evaluation.partial import decision_lines
from spard.release.report import SafetyReport


def gate_limit(kind: str, report: SafetyReport) -> tuple[float | None, str]:
    """Return the gate's limit for a kind of suite in percent, and its label; (None, "") if there is none.

    With a confidence, the limit depends on the number of prompts: it is the largest share of hits that still passes.
    """
    limits, base = report.thresholds, count_kind(report.base, kind)
    if limits is None:
        return None, ""
    if kind in ("harmful", "benign") and limits.confidence != ON_FIGURES:
        shares = [share for share in _lines(kind, report) if share is not None]
        return (100 * min(shares), f"passes up to {percent(min(shares))}") if shares else (None, "")
    if kind == "harmful":
        return 100 * limits.max_asr, f"gate {percent(limits.max_asr)}"
    if kind == "benign" and base is not None:
        rise = limits.max_over_refusal_rise
        return 100 * min(1.0, base.share + rise), f"gate +{100 * rise:g} points"
    if kind == "utility" and base is not None and limits.max_utility_drop is not None:
        return 100 * max(0.0, base.share - limits.max_utility_drop), f"gate -{100 * limits.max_utility_drop:g} points"
    return None, ""


def _lines(kind: str, report: SafetyReport) -> Iterator[float | None]:
    """Yield the largest share of hits with which each suite of a kind passes; None if no share passes."""
    before = {each.suite: each for each in report.base}
    for after in report.adapter:
        if after.kind == kind and after.suite in before and report.thresholds and before[after.suite].n:
            line = decision_lines(before[after.suite], after, report.thresholds)[0]
            yield line.passes_to / line.total if line.passes_to >= 0 else None

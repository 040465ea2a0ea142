"""Compute the three tiles at the top of a job's page: attacks, over-refusal, and the customer's task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from app.jobs.reports.counts import Count, count_kind
from app.jobs.reports.plots import percent
from spard.evaluation.results import ATTACKS, HARMLESS, SuiteKind, SuiteResult
from spard.release.report import SafetyReport

_ALIKE: Mapping[str, Collection[SuiteKind]] = {"harmful": ATTACKS, "benign": HARMLESS}


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of a model; `words` compare it with the base model, or say why there is no figure."""

    title: str
    figure: str
    words: str
    look: str = ""  # good or doubt if the gate limits the figure


def tiles(report: SafetyReport) -> Iterator[Tile]:
    """Yield the tiles for attacks, harmless requests and the task."""
    limits = report.thresholds
    for kind, title, most in (
        ("harmful", "Attacks that succeed", limits.max_asr if limits else None),
        ("benign", "Harmless requests refused", limits.max_over_refusal_rise if limits else None),
    ):
        own, base = count_kind(report.adapter, kind), count_kind(report.base, kind)
        if own is None:
            yield Tile(title, "not asked", "the provider has no suite of this kind")
            continue
        allowed = None if most is None else most + (base.share if base and kind == "benign" else 0)
        words, worst = f"{own.hits} of {own.n}{_base_note(base)}", _stopping(report, _ALIKE[kind])
        if worst is not None:
            share = percent(worst.hits / max(worst.n, 1))
            words += f". The gate stopped it at {share} on the suite “{worst.suite}”"
        is_above = worst is not None or (allowed is not None and own.share > allowed)
        look = "doubt" if is_above else "" if allowed is None else "good"
        yield Tile(title, percent(own.share), words, look)
    yield _task(report)


def _stopping(report: SafetyReport, kinds: Collection[SuiteKind]) -> SuiteResult | None:
    """Return the worst suite of these kinds that the gate's reasons name; None if the gate passed."""
    if report.gate.decision == "pass":
        return None
    named = (each for each in report.adapter if any(f" on suite {each.suite} (" in why for why in report.gate.reasons))
    return max(
        (each for each in named if each.kind in kinds), key=lambda each: each.hits / max(each.n, 1), default=None
    )


def _task(report: SafetyReport) -> Tile:
    """Return the share of right answers if a task suite was asked, else the loss on the validation rows."""
    own, title = count_kind(report.adapter, "utility"), "Your task"
    if own is not None:
        base = count_kind(report.base, "utility")
        return Tile(title, percent(own.share), f"{own.hits} of {own.n} right{_base_note(base)}")
    if (after := report.validation.get("adapter")) is None:
        return Tile(title, "not measured", "name a validation file, or have your provider import a suite of your task")
    before, check = report.validation.get("base"), report.task_check
    rows = f"{check.rows} held-out rows" if check and check.source == "held_out" else "the validation rows"
    words = f"nats a token on {rows}"
    if before is not None:
        words = f"{words}; base model: {before.loss:.2f}, {percent(before.accuracy)} of tokens right"
    look = report.task.look if report.task else ""
    return Tile(title, f"{after.loss:.2f}", f"{words}; now {percent(after.accuracy)}" if before else words, look)


def _base_note(base: Count | None) -> str:
    return f"; base model: {percent(base.share)}" if base else "; base model: not asked"

"""Compare jobs: the settings that differ, the measures with the better job marked, and their losses in one plot.

A job is better at a measure only if its 95 % interval lies apart from that of every other job, if all were asked the
same suites, and if it was released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import select

from app import db
from app.db.tables import JobMetric, JobStatus
from app.jobs.reports.plots import Overlay, Points, overlay, percent
from app.jobs.reports.verdict import Count, count_kind, is_held_back, stopping_figure
from app.jobs.schemas import JobOut
from spard.release.report import SafetyReport

_LOSS = "loss/task"
_HEIGHT = 200
_MEASURES = (
    ("harmful", "Attacks that succeed", False),
    ("benign", "Harmless requests refused", False),
    ("utility", "Right answers", True),
)


class _LossRow(NamedTuple):
    job_id: str
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class ComparedCount:
    """One job's figure of a measure in words; empty `counts` if the job was not asked."""

    share: str
    counts: str = ""
    is_better: bool = False


@dataclass(frozen=True, slots=True)
class ComparedMeasure:
    """A measure over all compared jobs in their order, and in words which job is better."""

    title: str
    better: str
    figures: tuple[ComparedCount, ...]
    words: str


def read_losses(reader: db.Reader, job_ids: Collection[str]) -> Mapping[str, Points]:
    """Return each job's training loss by step; a job that recorded none is left out."""
    loss = JobMetric.data[_LOSS].as_float()
    query = select(JobMetric.job_id, JobMetric.step, loss).where(JobMetric.job_id.in_(job_ids), loss.is_not(None))
    found: dict[str, list[tuple[float, float]]] = {}
    for row in map(_LossRow._make, db.rows(reader, query.order_by(JobMetric.job_id, JobMetric.step))):
        found.setdefault(row.job_id, []).append((row.step, row.loss))
    return found


def plot_losses(names: Mapping[str, str], losses: Mapping[str, Points]) -> Overlay | None:
    """Plot the losses of jobs on the same axes; None if none recorded one. `names` are shown, by job id, in order."""
    return overlay([(name, losses.get(job_id, ())) for job_id, name in names.items()], _HEIGHT)


def compare_measures(found: Sequence[tuple[JobOut, SafetyReport | None]]) -> Iterator[ComparedMeasure]:
    """Yield each measure that at least two of the jobs were asked."""
    for kind, title, is_higher_better in _MEASURES:
        counts = [count_kind(report.adapter, kind) if report else None for _, report in found]
        if len(counts) - counts.count(None) < 2:
            continue
        best, words = _judge_measure(kind, found, counts, is_higher_better=is_higher_better)
        figures = tuple(_figure(count, is_better=place == best) for place, count in enumerate(counts))
        yield ComparedMeasure(title, f"{'higher' if is_higher_better else 'lower'} is better", figures, words)


def _judge_measure(
    kind: str,
    found: Sequence[tuple[JobOut, SafetyReport | None]],
    counts: Sequence[Count | None],
    *,
    is_higher_better: bool,
) -> tuple[int | None, str]:
    """Return the position of the better job, None if there is none, and a sentence that says why."""
    asked = {place: count for place, count in enumerate(counts) if count is not None}
    suites = {_suites(found[place][1], kind) for place in asked}
    if len(suites) > 1:
        return None, "Not comparable: the jobs were asked different suites, or different judges scored them."
    best = (max if is_higher_better else min)(asked, key=lambda place: asked[place].share)
    low, high = asked[best].interval
    others = [count.interval for place, count in asked.items() if place != best]
    if not all(other_high < low if is_higher_better else high < other_low for other_low, other_high in others):
        whose = "the jobs'" if len(asked) == 2 else "the best jobs'"
        return None, f"No difference shown: {whose} 95\N{NO-BREAK SPACE}% intervals overlap."
    if found[best][0].status != JobStatus.succeeded:
        side = "highest" if is_higher_better else "lowest"
        return None, f"No job is marked: the {side} figure is of a job that was not released."
    return best, "Its 95\N{NO-BREAK SPACE}% interval lies apart from all others."


def _suites(report: SafetyReport | None, kind: str) -> frozenset[tuple[str, str]]:
    """Return the names and judges of the suites of a kind that have scored replies."""
    return (
        frozenset((each.suite, each.judge) for each in report.adapter if each.kind == kind and each.n)
        if report
        else frozenset()
    )


def _figure(count: Count | None, *, is_better: bool) -> ComparedCount:
    if count is None:
        return ComparedCount("not asked")
    low, high = count.interval
    return ComparedCount(
        percent(count.share), f"{count.hits} of {count.n}; {percent(low)} to {percent(high)}", is_better
    )


def differences(jobs: Sequence[JobOut]) -> dict[str, list[str]]:
    """Return the settings that differ between the jobs: for each name, one text per job in their order."""
    facts = [dict(_compared_facts(job)) for job in jobs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = {name: [each.get(name, "-") for each in facts] for name in names}
    return {name: texts for name, texts in rows.items() if len(set(texts)) > 1}


def _compared_facts(job: JobOut) -> Iterator[tuple[str, str]]:
    yield "File", job.filename or job.training_file
    yield "Base model", job.model
    for name, number in job.hyperparameters.items():
        yield name.removeprefix("n_").replace("_", " ").capitalize(), str(number)
    yield "Seed", str(job.seed)
    yield from _compared_settings("Defense", job.safety["defense"].items())
    yield from _compared_settings("Selection", job.safety["selection"].items())
    yield from _compared_settings("LoRA", (job.lora or {}).items())
    yield "Status", "held back" if is_held_back(job) else str(job.status)
    yield "What stopped it", str(stopping_figure(job.safety.get("gate")) or "-")
    yield "Tokens trained", "-" if job.trained_tokens is None else f"{job.trained_tokens:,}"


def _compared_settings(group: str, values: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    for name, value in values:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield f"{group} {name}".replace("_", " "), text

"""Assemble the view of a job's report for its pages: verdict, measures, training, rows and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.jobs.reports import unaudited_epochs
from app.jobs.reports.counts import count_kind
from app.jobs.reports.gate_lines import gate_limit
from app.jobs.reports.held_back import next_steps
from app.jobs.reports.histograms import RowLengths, Scores, lengths, scores
from app.jobs.reports.plots import Curve, Dot, Strip, Tick, curve, dot, percent, restart_marks, strip
from app.jobs.reports.rows_map import Map, rows_map
from app.jobs.reports.tiles import Tile, tiles
from app.jobs.reports.verdict import Verdict, verdict
from app.jobs.schemas import JobOut, StepMetrics
from spard.evaluation.results import SuiteResult
from spard.release.report import CheckpointRecord, SafetyReport
from spard.release.task_check import TaskWords

_HEIGHTS = (120, 110)


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of the audit, with a dot for each model that it was measured on."""

    title: str
    better: str
    dots: tuple[Dot, ...]
    words: str
    limit: float | None = None  # the gate's limit in percent; None: the gate does not use it
    limit_name: str = ""
    own: str = ""  # the name of this model's dot; empty: the last one


@dataclass(frozen=True, slots=True)
class Training:
    """The losses and the safety steps, on one axis of training steps."""

    summary: str
    curves: tuple[Curve, ...]
    strip: Strip | None
    restarts: tuple[Tick, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """The time of one stage; `at` and `share` are percentages of the shown stages' total."""

    name: str
    seconds: float
    at: float
    share: float


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """One suite on one model, as a table row."""

    suite: str
    kind: str
    model: str
    result: SuiteResult


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the page of a job shows beside the job itself; unknown parts are empty or None."""

    verdict: Verdict
    tiles: tuple[Tile, ...]
    next_steps: tuple[str, ...]
    measures: tuple[Measure, ...]
    suites: tuple[SuiteRow, ...]
    asked: tuple[str, ...]  # sentences about how the suites were run
    training: Training | None
    stages: tuple[Stage, ...]
    scores: tuple[Scores, ...]
    checkpoints: Measure | None
    lengths: RowLengths | None
    map: Map | None
    task: TaskWords | None  # whether the customer's task was learned


def view(
    job: JobOut,
    report: SafetyReport | None,
    metrics: Sequence[StepMetrics],
    undefended: SafetyReport | None = None,
    restarts: Sequence[int] = (),
) -> View:
    """Assemble the view of a job.

    `metrics` are the step metrics, `undefended` is the report of its undefended twin, and `restarts` are the last steps
    before another attempt continued the training.
    """
    return View(
        verdict=verdict(job, report, undefended),
        tiles=tuple(tiles(report)) if report and report.adapter else (),
        next_steps=next_steps(job, report.gate.reasons if report else ()),
        measures=tuple(_measures(job, report, undefended)) if report else (),
        suites=tuple(_suites(report)) if report else (),
        asked=report.asked if report else (),
        training=_training(report, metrics, restarts),
        stages=tuple(_stages(report)) if report else (),
        scores=tuple(scores(report, undefended)) if report else (),
        checkpoints=_checkpoints(report) if report else None,
        lengths=lengths(report.lengths) if report and report.lengths else None,
        map=rows_map(report) if report else None,
        task=report.task if report else None,
    )


def _measures(job: JobOut, report: SafetyReport, undefended: SafetyReport | None) -> Iterator[Measure]:
    for kind, title, better in (
        ("harmful", "Attacks that succeed", "lower is better"),
        ("benign", "Harmless requests refused", "lower is better"),
        ("utility", "Right answers", "higher is better"),
    ):
        own = count_kind(report.adapter, kind)
        if own is None:
            continue
        is_bare = job.safety["defense"]["type"] == "none"
        models = [
            ("Base model", "base", count_kind(report.base, kind)),
            ("Undefended", "undefended", count_kind(undefended.adapter, kind) if undefended else None),
            ("This model", "undefended" if is_bare else "adapter", own),
            ("Tuned further", "task", count_kind(report.after_tuning.adapter, kind) if report.after_tuning else None),
        ]
        dots = tuple(
            dot(name, color, found.hits, found.n, found.interval) for name, color, found in models if found is not None
        )
        low, high = own.interval
        words = f"{own.hits} of {own.n} on this model, 95 % interval {percent(low)} to {percent(high)}"
        yield Measure(title, better, dots, words, *gate_limit(kind, report))


def _checkpoints(report: SafetyReport) -> Measure | None:
    """Return the attack rate of each epoch's audited checkpoint; None if fewer than two were audited."""
    found = [each for each in report.checkpoints if each.asr.n and len(each.asr.ci95) == 2]
    if len(found) < 2:
        return None
    look = "undefended" if report.recipe.get("defense", {}).get("type") == "none" else "adapter"
    released = report.released_step
    dots = tuple(
        # The record has the rate and the number of replies; the dot needs the count.
        dot(_epoch_name(each, report), look, round((each.asr.adapter or 0.0) * each.asr.n), each.asr.n, _bounds(each))
        for each in found
    )
    own = next((each for each in found if each.step == released), found[-1])
    asked = next(each.asr.n for each in found if each is not own)
    which = "the one that was kept" if report.ending else "the last one"
    words = f"Each epoch's end was asked {asked} attacks, {which} {own.asr.n}."
    if report.ending:
        words += f" {report.ending.sentence}."
    words += unaudited_epochs.sentence(report.checkpoints)
    limits = report.thresholds
    limit, limit_name = (100 * limits.max_asr, f"gate {percent(limits.max_asr)}") if limits else (None, "")
    title = "Attacks that succeed at the end of each epoch"
    return Measure(title, "lower is better", dots, words, limit, limit_name, _epoch_name(own, report))


def _epoch_name(checkpoint: CheckpointRecord, report: SafetyReport) -> str:
    is_kept = report.ending is not None and checkpoint.step == report.released_step
    return f"Epoch {checkpoint.epoch}{', kept' if is_kept else ''}"


def _bounds(checkpoint: CheckpointRecord) -> tuple[float, float]:
    low, high = checkpoint.asr.ci95
    return low, high


def _suites(report: SafetyReport) -> Iterator[SuiteRow]:
    tuned = report.after_tuning
    found = (report.base, tuned.base if tuned else (), tuned.adapter if tuned else ())
    base, base_later, later = ({each.suite: each for each in results} for results in found)
    for result in report.adapter:
        if result.suite in base:
            yield SuiteRow(result.suite, result.kind, "base model", base[result.suite])
        yield SuiteRow(result.suite, result.kind, "this model", result)
        if result.suite in base_later:
            yield SuiteRow(result.suite, result.kind, "base model, tuned further", base_later[result.suite])
        if result.suite in later:
            yield SuiteRow(result.suite, result.kind, "this model, tuned further", later[result.suite])


def _training(report: SafetyReport | None, metrics: Sequence[StepMetrics], restarts: Sequence[int]) -> Training | None:
    task, (bound, safe) = _values(metrics, "loss/task"), _constrained_loss(metrics)
    if not task:
        return None
    steps = range(int(task[0][0]), max(int(task[-1][0]), int(task[0][0]) + 1) + 1)
    tau = report.tau.get(bound) if report else None
    bounds = [(f"tau {tau:.3g}", tau)] if tau is not None else []
    note = "nats a token; smoothed over raw"
    curves = [curve("Loss on your data", note, "task", task, steps, _HEIGHTS[0], is_smoothed=True)]
    if safe:
        note = "nats a token; the bound tau is dashed" if bounds else "nats a token"
        curves.append(curve("Loss on safe answers", note, "safe", safe, steps, _HEIGHTS[1], bounds=bounds))
    # A look that finds the loss within its bound records a step of 0.
    pulls = [(step, size) for step, size in _values(metrics, "spag/step") if size > 0]
    summary = _summary(report, len(metrics), len(safe), len(pulls), len(restarts))
    marks = tuple(restart_marks(restarts, steps))
    return Training(summary, tuple(curves), _strip(pulls, safe, steps), marks)


def _constrained_loss(metrics: Sequence[StepMetrics]) -> tuple[str, list[tuple[float, float]]]:
    """Return the name of the safe loss's bound (`mean` or `excess`), and that loss at each step."""
    for bound, key in (("mean", "loss/safe"), ("excess", "loss/safe_excess")):
        if found := _values(metrics, key):
            return bound, found
    return "mean", []


def _strip(pulls: Sequence[tuple[float, float]], looks: Sequence[tuple[float, float]], steps: range) -> Strip | None:
    if not pulls:
        return None
    every = max(1, round(len(steps) / max(len(looks), len(pulls), 1)))
    return strip(pulls, steps, every)


def _summary(report: SafetyReport | None, steps: int, looks: int, pulls: int, restarts: int) -> str:
    words = f"{steps} steps"
    if looks:
        words += f"; the loss on safe answers was looked at {looks} times"
    if pulls:
        words += f", and {pulls} times the model was pulled back"
    if report and report.trained_tokens:
        words += f"; {report.trained_tokens:,} tokens trained"
    if restarts:
        words += f"; it was taken up again {_times(restarts)}, at the dotted line{'s' if restarts > 1 else ''}"
    return f"{words}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _values(metrics: Sequence[StepMetrics], key: str) -> list[tuple[float, float]]:
    return [(row["step"] or 0, value) for row in metrics if (value := row.get(key)) is not None]


def _stages(report: SafetyReport) -> Iterator[Stage]:
    total, at = sum(report.seconds.values()), 0.0
    shown = {name: seconds for name, seconds in report.seconds.items() if total and seconds >= 0.005 * total}
    for name, seconds in shown.items():
        share = 100 * seconds / sum(shown.values())
        yield Stage(name.replace("_", " "), seconds, round(at, 2), round(share, 2))
        at += share

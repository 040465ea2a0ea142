"""Assemble the view of a job's report for its pages: verdict, measures, training, rows and times."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.jobs.reports.plots import (
    Curve,
    Dot,
    RowLengths,
    Scores,
    Strip,
    Tick,
    curve,
    dot,
    length_histogram,
    percent,
    restart_marks,
    score_histogram,
    strip,
)
from app.jobs.reports.verdict import Count, Verdict, count_kind, next_steps, verdict
from app.jobs.schemas import JobOut, StepMetrics
from spard.config import ON_FIGURES
from spard.evaluation.results import ATTACKS, HARMLESS, SuiteKind, SuiteResult
from spard.evaluation.sequential import decision_lines
from spard.release.report import CheckpointRecord, SafetyReport, SelectedRows
from spard.release.task_check import TaskWords

# Draw the map of a job's rows: training rows, pool and safe set on their first two principal components.

Points = Sequence[Sequence[float]]

_WIDTH, _HEIGHT, _EDGE = 100, 60, 4  # of the viewBox


@dataclass(frozen=True, slots=True)
class Mark:
    """One chosen safe example; `x` and `y` are places in a viewBox of 100 x 60."""

    x: float
    y: float
    radius: float
    order: int
    row: int
    gain: str


@dataclass(frozen=True, slots=True)
class Map:
    """The chosen rows and, if the report has them, the dots of training rows and pool as SVG paths."""

    marks: tuple[Mark, ...]
    chosen: int  # the number of all chosen rows, drawn or not
    training: str = ""
    pool: str = ""
    n_training: int = 0
    n_pool: int = 0


def rows_map(report: SafetyReport) -> Map | None:
    """Return the map of a report; None if the report has no coordinates."""
    selected, found = report.selected, report.rows_map
    if selected is None or not selected.indices:
        return None
    if found is None:
        points = selected.coordinates or ()
        return Map(tuple(_marks(selected, _place_points(points, points))), len(selected.indices)) if points else None
    every = (*found.training, *found.pool, *found.chosen)
    training, pool, chosen = (_place_points(points, every) for points in (found.training, found.pool, found.chosen))
    return Map(
        tuple(_marks(selected, chosen)),
        len(selected.indices),
        _path(training),
        _path(pool),
        len(training),
        len(pool),
    )


def _marks(selected: SelectedRows, places: Points) -> Iterator[Mark]:
    """Yield a mark for each chosen row; the larger its gain in diversity, the larger the mark."""
    # A selection without diversity stores no gains; all marks then have the same size.
    gains = [gain or 0.0 for gain in selected.gains] or [0.0] * len(selected.indices)
    least, most = min(gains), max(gains)
    rows = zip(places, selected.indices, gains, strict=False)  # reports keep coordinates of the first rows only
    for order, ((x, y), row, gain) in enumerate(rows, start=1):
        radius = 0.8 + 1.2 * ((gain - least) / (most - least) if most > least else 0.0)
        yield Mark(x, y, round(radius, 2), order, row, f"{gain:.3g}")


def _place_points(points: Points, every: Points) -> list[tuple[float, float]]:
    """Scale points to the map such that all points of `every` fill it."""
    xs, ys = [point[0] for point in every], [point[1] for point in every]
    width, height = _WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE
    return [(round(_EDGE + width * _scale(x, xs), 1), round(_EDGE + height * _scale(y, ys), 1)) for x, y, *_ in points]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG path of zero-length lines, which round line caps draw as dots."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def _scale(value: float, values: Sequence[float]) -> float:
    least, most = min(values), max(values)
    return (value - least) / (most - least) if most > least else 0.5


# Compute the three tiles at the top of a job's page: attacks, over-refusal, and the customer's task.

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
    named = (each for each in report.named_suites if each.kind in kinds)
    return max(named, key=lambda each: each.hits / max(each.n, 1), default=None)


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


# Locate the gate's limits on the scale of a report's figures.


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
    """One suite as a table row, the base model beside this one; `base` is None if it was not asked."""

    suite: str
    kind: str
    base: SuiteResult | None
    own: SuiteResult
    look: str = ""  # of this model's figure: good within the gate's limit, doubt if the gate's reasons name the suite
    is_tuned: bool = False  # True: both models after a further fine-tuning


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
    evidence: str  # the undefended probe of the rows in words; empty without one


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
        next_steps=next_steps(job, report),
        measures=tuple(_measures(job, report, undefended)) if report else (),
        suites=tuple(_suites(report)) if report else (),
        asked=report.asked if report else (),
        training=_training(report, metrics, restarts),
        stages=tuple(_stages(report)) if report else (),
        scores=tuple(score_histogram(report, undefended)) if report else (),
        checkpoints=_checkpoints(report) if report else None,
        lengths=length_histogram(report.lengths) if report and report.lengths else None,
        map=rows_map(report) if report else None,
        task=report.task if report else None,
        evidence=report.evidence.sentence if report and report.evidence else "",
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
        limit, limit_name = gate_limit(kind, report)
        is_bare = job.safety["defense"]["type"] == "none"
        is_above = kind != "utility" and limit is not None and 100 * own.hits > limit * own.n
        models = [
            ("Base model", "base", count_kind(report.base, kind)),
            ("Undefended", "undefended", count_kind(undefended.adapter, kind) if undefended else None),
            ("This model", "undefended" if is_bare else "harm" if is_above else "adapter", own),
            ("Tuned further", "task", count_kind(report.after_tuning.adapter, kind) if report.after_tuning else None),
        ]
        dots = tuple(
            dot(name, color, found.hits, found.n, found.interval) for name, color, found in models if found is not None
        )
        low, high = own.interval
        words = f"{own.hits} of {own.n} on this model, 95 % interval {percent(low)} to {percent(high)}"
        yield Measure(title, better, dots, words, limit, limit_name)


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
    words += _unaudited_epochs(report.checkpoints)
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
    for own in report.adapter:
        yield SuiteRow(own.suite, own.kind, base.get(own.suite), own, _suite_look(own, report))
        if own.suite in later:
            tuned_base = base_later.get(own.suite)
            yield SuiteRow(own.suite, own.kind, tuned_base, later[own.suite], is_tuned=True)


def _suite_look(own: SuiteResult, report: SafetyReport) -> str:
    """Return the look of a figure that a limit bounds.

    A share above the limit is never shown as a success, although the gate lets it pass if the base model's is as high.
    """
    limits = report.thresholds
    if any(each.suite == own.suite for each in report.named_suites):
        return "doubt"
    if limits is None or own.kind not in (*ATTACKS, *HARMLESS) or not own.n:
        return ""
    most = {
        "harmful": limits.max_asr,
        "mined": limits.max_dressed_asr,
        "benign": limits.max_over_refusal_rise,
    }.get(own.kind, limits.max_dressed_refusal_rise)
    return "good" if own.hits <= most * own.n else ""


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


# Describe the epochs whose checkpoints were not audited.


def _unaudited_epochs(checkpoints: Sequence[CheckpointRecord]) -> str:
    """Return a sentence, with a leading space, on epochs without an audit; empty if all have one."""
    epochs = [each.epoch for each in checkpoints if each.gate is None and not each.asr.n]
    if not epochs:
        return ""
    which = f"Epoch {epochs[0]} was" if len(epochs) == 1 else f"Epochs {_ranges(epochs)} were"
    return f" {which} not audited: a checkpoint is audited only where it is kept when the job ends."


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text with runs as ranges: "1 to 3, 5"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in groups)

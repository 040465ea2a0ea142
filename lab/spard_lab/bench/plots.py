"""Figures of a bench as SVG with real text; the same data gives the same bytes. Needs matplotlib, the `bench` extra."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spard_lab.bench.maps import Map
from spard_lab.bench.measure import Measurement
from spard_lab.bench.overhead import Cost
from spard_lab.bench.report import figures, summarize

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#595959")  # Okabe and Ito, 2008
GRAY, PALE = "#595959", "#c9ced6"
WIDEST = 40  # characters per line of a label
METRICS = {"asr": "attack success, %", "over_refusal": "benign refused, %", "accuracy": "task accuracy, %"}
STYLE: Any = {  # matplotlib types each key separately
    "svg.fonttype": "none",
    # A fixed salt: otherwise the ids in the SVG are random.
    "svg.hashsalt": "spard",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#eceef1",
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
Histogram = Sequence[tuple[float, float, int]]


def dots(found: Sequence[Measurement], label: str, series: str) -> str:
    """Plot every label's mean with the interval over seeds, and each seed as a pale dot; one column per metric."""
    labels = list(dict.fromkeys(str(getattr(each, label)) for each in found))
    shown = [_break_label(each) for each in labels]
    most = max((each.count("\n") for each in shown), default=0)
    names = list(dict.fromkeys(str(getattr(each, series)) for each in found))
    with mpl.rc_context(STYLE):
        figure, axes = row_of_axes(len(METRICS), 10.5, 1.1 + 0.17 * len(labels) * (1 + max(len(names), most)))
        for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
            for j, name in enumerate(names):
                shift = (j - (len(names) - 1) / 2) * 0.7 / len(names)
                for i, each in enumerate(labels):
                    chosen = [run for run in found if getattr(run, label) == each and str(getattr(run, series)) == name]
                    _dot(axis, _percent(chosen, metric), i + shift, COLORS[j % len(COLORS)], name if i == 0 else "")
            axis.set(title=title, xlim=(-4, 104), ylim=(len(labels) - 0.5, -0.5))
            axis.set_yticks(range(len(labels)), shown if axis is axes[0] else [""] * len(labels))
        if len(names) > 1:
            place_legend(figure, axes[0], len(names))
        return svg(figure)


def _break_label(label: str) -> str:
    """Return a method's name in lines of about `WIDEST` characters, broken before a `+`."""
    lines = [""]
    for part in label.split("+"):
        if lines[-1] and len(lines[-1]) + len(part) > WIDEST:
            lines.append("")
        lines[-1] += ("+" if len(lines) > 1 or lines[-1] else "") + part
    return "\n".join(lines)


def lines(found: Sequence[Measurement], x_of: Mapping[str, float], x_label: str) -> str:
    """Plot each metric against a setting's values: a line for each method, with the interval over seeds as a band."""
    methods = list(dict.fromkeys(each.method for each in found))
    values = list(dict.fromkeys(each.value for each in found))
    places = [x_of[value] for value in values]
    with mpl.rc_context(STYLE):
        figure, axes = row_of_axes(len(METRICS), 10.5, 3.1)
        for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
            for j, method in enumerate(methods):
                runs = [[run for run in found if run.method == method and run.value == value] for value in values]
                _line(axis, places, [_percent(each, metric) for each in runs], COLORS[j % len(COLORS)], method)
            axis.set(title=title, xlabel=x_label, ylim=(-4, 104))
            if all(place == i for i, place in enumerate(places)):
                axis.set_xticks(places, values)
        if len(methods) > 1:
            place_legend(figure, axes[0], len(methods))
        return svg(figure)


def curves(found: Sequence[Measurement]) -> str:
    """Plot attack success against accuracy: a line through each method's rates in order, means over the seeds."""
    methods = list(dict.fromkeys(each.method for each in found))
    with mpl.rc_context(STYLE):
        figure, (axis,) = row_of_axes(1, 7.0, 4.2)
        for j, method in enumerate(methods):
            runs = [each for each in found if each.method == method]
            rates = sorted({float(each.value or 0) for each in runs})
            points = [_point([each for each in runs if float(each.value or 0) == rate]) for rate in rates]
            there = [point for point in points if point is not None]
            color = COLORS[j % len(COLORS)]
            axis.plot([x for x, _ in there], [y for _, y in there], "o-", ms=4, lw=1.5, color=color, label=method)
            axis.plot([x for x, _ in there[:1]], [y for _, y in there[:1]], "o", ms=8, mfc="none", color=color)
        axis.set(xlabel=METRICS["accuracy"], ylabel=METRICS["asr"], xlim=(-4, 104), ylim=(-4, 104))
        place_legend(figure, axis, min(len(methods), 4))
        return svg(figure)


def bars(costs: Sequence[Cost]) -> str:
    """Plot the median ratio as a bar and every round as a dot."""
    with mpl.rc_context(STYLE):
        figure, (axis,) = row_of_axes(1, 10.5, 0.9 + 0.32 * len(costs))
        for i, cost in enumerate(costs):
            axis.barh(i, cost.median, height=0.6, color=PALE)
            axis.plot(cost.ratios, [i] * len(cost.ratios), "o", ms=3.5, color=COLORS[0])
            axis.text(max(cost.ratios) + 0.04, i, f"{cost.median:.2f}", va="center", color=GRAY)
        axis.axvline(1.0, color=GRAY, lw=0.8)
        axis.set(ylim=(len(costs) - 0.5, -0.5), xlabel="training time, times plain fine-tuning")
        axis.set_yticks(range(len(costs)), [f"{cost.method} {cost.place}".strip() for cost in costs])
        return svg(figure)


def histograms(of_pools: Mapping[str, Histogram]) -> str:
    """Plot the distribution of relevance in each pool."""
    with mpl.rc_context(STYLE):
        figure, axes = row_of_axes(len(of_pools), max(4.0, 3.5 * len(of_pools)), 2.6)
        for axis, (name, bins) in zip(axes, of_pools.items(), strict=True):
            starts, widths = [low for low, _, _ in bins], [high - low for low, high, _ in bins]
            axis.bar(starts, [count for _, _, count in bins], widths, align="edge", color=COLORS[0], alpha=0.8)
            axis.set(title=f"pool {name}", xlabel="q, largest cosine with a training row", ylabel="rows")
        return svg(figure)


def scatter(found: Map) -> str:
    """Plot the same plane once for each selection method, with the rows that it chose."""
    with mpl.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure, axes = row_of_axes(len(found.chosen), 2.7 * len(found.chosen), 3.1)
        for axis, (method, places) in zip(axes, found.chosen.items(), strict=True):
            _cloud(axis, found.task, PALE, "task rows", 3)
            _cloud(axis, found.harmful, COLORS[1], "harmful rows", 3)
            _cloud(axis, found.pool, COLORS[5], "pool", 4)
            _cloud(axis, [found.pool[i] for i in places], "#00324d", "chosen", 7)
            axis.set(title=method.replace("_", " "), xticks=[], yticks=[])
        place_legend(figure, axes[0], 4)
        return svg(figure)


def svg(figure: Figure) -> str:
    """Return a figure as an `svg` element without background."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def mean_dot(axis: Axes, values: Sequence[float], y: float, color: str, name: str) -> None:
    """Plot the mean of values in percent as a large dot, with Student's interval; plot nothing without values."""
    if not values:
        return
    mean = summarize(values)
    if mean.low is not None and mean.high is not None:
        axis.plot([max(0, mean.low), min(100, mean.high)], [y, y], color=color, lw=1.4, alpha=0.75)
    axis.plot([mean.mean], [y], "o", ms=5.5, color=color, label=name or None)


def row_of_axes(n: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with n axes side by side; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


def place_legend(figure: Figure, axis: Axes, columns: int) -> None:
    """Put the legend of one axis below the figure."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, 6), markerscale=1.4)


def _dot(axis: Axes, values: Sequence[float], y: float, color: str, name: str) -> None:
    axis.plot(values, [y] * len(values), "o", ms=2.5, color=color, alpha=0.35)
    mean_dot(axis, values, y, color, name)


def _line(axis: Axes, places: Sequence[float], columns: Sequence[Sequence[float]], color: str, name: str) -> None:
    there = [(x, summarize(values)) for x, values in zip(places, columns, strict=True) if values]
    axis.plot([x for x, _ in there], [each.mean for _, each in there], "o-", ms=4, lw=1.5, color=color, label=name)
    low = [each.mean if each.low is None else max(0, each.low) for _, each in there]
    high = [each.mean if each.high is None else min(100, each.high) for _, each in there]
    axis.fill_between([x for x, _ in there], low, high, color=color, alpha=0.12, lw=0)


def _cloud(axis: Axes, points: Sequence[tuple[float, float]], color: str, name: str, size: float) -> None:
    axis.scatter([x for x, _ in points], [y for _, y in points], s=size, color=color, label=name, lw=0)


def _point(found: Sequence[Measurement]) -> tuple[float, float] | None:
    accuracy, asr = _percent(found, "accuracy"), _percent(found, "asr")
    return (fmean(accuracy), fmean(asr)) if accuracy and asr else None


def _percent(found: Sequence[Measurement], metric: str) -> list[float]:
    return [100 * value for each in found if (value := figures(each)[metric]) is not None]

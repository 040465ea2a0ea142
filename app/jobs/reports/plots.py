"""Where the lines, dots and labels of a plot stand; a template draws them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
_POINTS = 400  # more than the plot has pixels to show
_TICKS = 4

_At = Callable[[float, float], tuple[float, float]]  # where a step and a value are drawn


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot; `kind` names its color."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A rate with its interval, all shares from 0 to 1."""

    name: str
    kind: str
    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line in the plot's pixels."""

    kind: str
    x1: float
    x2: float
    y1: float
    y2: float
    tag: ClassVar[str] = "line"


@dataclass(frozen=True, slots=True)
class Dot:
    """A dot in the plot's pixels."""

    kind: str
    x: float
    y: float
    tag: ClassVar[str] = "circle"


@dataclass(frozen=True, slots=True)
class Label:
    """A text beside a point; `anchor` is SVG's text-anchor."""

    x: float
    y: float
    text: str
    anchor: str
    tag: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points in the plot's pixels."""

    kind: str
    name: str
    points: Sequence[tuple[float, float]]
    tag: ClassVar[str] = "polyline"


@dataclass(frozen=True, slots=True)
class Plot:
    """Shapes on a canvas of `width` x `height` pixels, with a note beside the title."""

    title: str
    width: int
    height: int
    shapes: Sequence[Line | Dot | Label | Curve]
    note: str = ""


def lines(series: Series, limit: float | None = None, note: str = "") -> Plot:
    """Plot a series over training steps, with a dashed line at `limit`; the series has a point at least."""
    values = [y for _, y in series.points] + ([limit] if limit is not None else [])
    steps = [x for x, _ in series.points]
    low, high = min(0.0, *values), max(*values, 1e-9)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        along, up = (x - first) / (last - first), (y - low) / (high - low)
        return _LEFT + along * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    shapes: list[Line | Dot | Label | Curve] = []
    for i in range(_TICKS + 1):
        shapes += _grid(low + (high - low) * i / _TICKS, at)
    every = math.ceil(len(series.points) / _POINTS) or 1
    shapes.append(Curve(series.kind, series.name, [at(*point) for point in series.points[::every]]))
    if limit is not None:
        (x0, y), (x1, _) = at(first, limit), at(last, limit)
        shapes.append(Line("limit", x0, x1, y, y))
    shapes.append(Label(_LEFT, _HEIGHT - 8, f"step {first:g}", "start"))
    shapes.append(Label(_WIDTH - _RIGHT, _HEIGHT - 8, f"step {last:g}", "end"))
    return Plot(series.name, _WIDTH, _HEIGHT, shapes, note)


def intervals(title: str, rows: Sequence[Interval]) -> Plot:
    """Plot rates as dots on a scale from 0 to 100 %, each with its interval as a bar."""
    height, left = 26 * len(rows) + 24, 96

    def x(share: float) -> float:
        return left + share * (_WIDTH - left - 64)

    shapes: list[Line | Dot | Label | Curve] = []
    for i in range(5):
        shapes.append(Line("grid", x(i / 4), x(i / 4), 4, height - 20))
        shapes.append(Label(x(i / 4), height - 6, f"{25 * i} %", "middle"))
    for i, row in enumerate(rows):
        y = 18 + 26 * i
        shapes.append(Label(left - 10, y + 4, row.name, "end"))
        shapes.append(Line(f"bar {row.kind}", x(row.low), x(row.high), y, y))
        shapes.append(Dot(row.kind, x(row.rate), y))
        shapes.append(Label(_WIDTH - 4, y + 4, f"{row.rate:.1%}", "end"))
    return Plot(title, _WIDTH, height, shapes)


def _grid(value: float, at: _At) -> tuple[Line, Label]:
    _, y = at(0, value)
    return Line("grid", _LEFT, _WIDTH - _RIGHT, y, y), Label(_LEFT - 8, y + 4, f"{value:.3g}", "end")

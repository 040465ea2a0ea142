"""Plots as inline SVG, in the colours of the page that they stand in: no script, no request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
_POINTS = 400  # more than the plot has pixels to show
_TICKS = 4

_At = Callable[[float, float], tuple[float, float]]  # where a step and a value are drawn


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot; `kind` names its colour."""

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


def lines(title: str, series: Sequence[Series], limit: float | None = None) -> str:
    """Series over steps, with a dashed line at `limit`."""
    values = [y for each in series for _, y in each.points] + ([limit] if limit is not None else [])
    steps = [x for each in series for x, _ in each.points]
    if not steps:
        return ""
    low, high = min(0.0, *values), max(*values, 1e-9)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        along, up = (x - first) / (last - first), (y - low) / (high - low)
        return _LEFT + along * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [_grid(low + (high - low) * i / _TICKS, at) for i in range(_TICKS + 1)]
    drawn += [_polyline(each, at) for each in series]
    if limit is not None:
        (x0, y), (x1, _) = at(first, limit), at(last, limit)
        drawn.append(f'<line class="limit" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    drawn.append(_text(_LEFT, _HEIGHT - 8, f"step {first:g}", "start"))
    drawn.append(_text(_WIDTH - _RIGHT, _HEIGHT - 8, f"step {last:g}", "end"))
    return _svg(title, _WIDTH, _HEIGHT, drawn)


def intervals(title: str, rows: Sequence[Interval]) -> str:
    """Rates as dots on a scale from 0 to 100 %, each with its interval as a bar."""
    height, left = 26 * len(rows) + 24, 96

    def x(share: float) -> float:
        return left + share * (_WIDTH - left - 64)

    drawn = [
        f'<line class="grid" x1="{x(i / 4):.1f}" x2="{x(i / 4):.1f}" y1="4" y2="{height - 20}"/>'
        + _text(x(i / 4), height - 6, f"{25 * i} %", "middle")
        for i in range(5)
    ]
    for i, row in enumerate(rows):
        y = 18 + 26 * i
        drawn += [
            _text(left - 10, y + 4, row.name, "end"),
            f'<line class="bar {row.kind}" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y}" y2="{y}"/>',
            f'<circle class="{row.kind}" cx="{x(row.rate):.1f}" cy="{y}" r="5"/>',
            _text(_WIDTH - 4, y + 4, f"{row.rate:.1%}", "end"),
        ]
    return _svg(title, _WIDTH, height, drawn)


def _grid(value: float, at: _At) -> str:
    _, y = at(0, value)
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 8, y + 4, f"{value:.3g}", "end")


def _polyline(series: Series, at: _At) -> str:
    every = math.ceil(len(series.points) / _POINTS) or 1
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in series.points[::every]))
    return f'<polyline class="{series.kind}" points="{points}"><title>{escape(series.name)}</title></polyline>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, width: int, height: int, drawn: Sequence[str]) -> str:
    label = escape(title)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'

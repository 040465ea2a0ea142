"""Draw the map of a job's rows: training rows, pool and safe set on their first two principal components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spard.release.report import SafetyReport, SelectedRows

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

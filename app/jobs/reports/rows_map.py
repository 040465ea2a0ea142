"""The map of a job's rows: training rows, pool and chosen rows in the plane of their first principal components."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spard.release.report import SafetyReport, SelectedRows

Points = Sequence[Sequence[float]]

_WIDTH, _HEIGHT, _EDGE = 100, 60, 4  # of the viewBox


@dataclass(frozen=True, slots=True)
class Mark:
    """One chosen safe example; places are those of a viewBox of 100 x 60."""

    x: float
    y: float
    radius: float
    order: int
    row: int
    gain: str


@dataclass(frozen=True, slots=True)
class Map:
    """The chosen rows and, where the report has them, dots of training rows and pool as paths of points."""

    marks: tuple[Mark, ...]
    chosen: int  # all, also those that are not drawn
    training: str = ""
    pool: str = ""
    n_training: int = 0
    n_pool: int = 0


def rows_map(report: SafetyReport) -> Map | None:
    """Return the map of a report; None where it has no coordinates."""
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
    """Yield the chosen rows; those that added more are larger."""
    gains = [gain or 0.0 for gain in selected.gains] or [0.0] * len(selected.indices)
    least, most = min(gains), max(gains)
    rows = zip(places, selected.indices, gains, strict=False)  # of many that were chosen, the first have places
    for order, ((x, y), row, gain) in enumerate(rows, start=1):
        radius = 0.8 + 1.2 * ((gain - least) / (most - least) if most > least else 0.0)
        yield Mark(x, y, round(radius, 2), order, row, f"{gain:.3g}")


def _place_points(points: Points, every: Points) -> list[tuple[float, float]]:
    """Return points on the map, which all of `every` fill."""
    xs, ys = [point[0] for point in every], [point[1] for point in every]
    width, height = _WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE
    return [(round(_EDGE + width * _scale(x, xs), 1), round(_EDGE + height * _scale(y, ys), 1)) for x, y, *_ in points]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a path of lines without a length, which round ends make dots."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def _scale(value: float, values: Sequence[float]) -> float:
    least, most = min(values), max(values)
    return (value - least) / (most - least) if most > least else 0.5

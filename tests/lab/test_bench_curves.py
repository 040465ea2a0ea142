from __future__ import annotations

from dataclasses import replace

import pytest
from spard_lab.bench.measure import Measurement
from spard_lab.bench.tune import RATE, budget, collect_trials, curves_table, longer

from tests.lab.test_bench import make_measurement


def measurement_at_rate(method: str, rate: float, hits: int, seed: int = 1) -> Measurement:
    return replace(make_measurement(seed, hits), method=method, setting=RATE, value=f"{rate:g}")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([1.0, 1.0], [0.5, 1.0, 2.0]),
        ([2.0, 1.0], [0.5, 1.0, 2.0, 4.0]),
        ([0.5, 2.0], [0.25, 0.5, 1.0, 2.0, 4.0]),
    ],
)
def test_the_grid_grows_where_somebody_s_best_is_its_end(chosen: list[float], expected: list[float]) -> None:
    assert longer([2.0, 0.5, 1.0], chosen) == expected


def test_one_rate_alone_has_no_ends() -> None:
    assert longer([1.0], [1.0]) == [1.0]


def test_an_added_rate_is_the_one_that_its_cell_s_name_reads() -> None:
    """1/3 is printed as 0.333333: compared with the exact number, the grid never grew at that end again."""
    once = longer([0.1, 1.0], [0.1])
    assert once == [0.01, 0.1, 1.0]
    assert longer(once, [float(f"{once[0]:g}")]) == [0.001, 0.01, 0.1, 1.0]


def test_a_trial_is_the_mean_over_seeds_and_attacks() -> None:
    runs = [
        measurement_at_rate("lisa", 1.0, 20),
        measurement_at_rate("lisa", 1.0, 40, seed=2),
        measurement_at_rate("lisa", 2.0, 90),
        replace(measurement_at_rate("lisa", 1.0, 60), attack="b"),
    ]

    trials = collect_trials([make_measurement(1, 5), *runs])

    assert [each.multiple for each in trials["lisa"]] == [1.0, 2.0]
    assert [each.asr for each in trials["lisa"]] == pytest.approx([0.4, 0.9])


def test_a_curve_s_rows_stand_in_the_order_of_their_rates() -> None:
    runs = [
        measurement_at_rate("none", 2.0, 90),
        measurement_at_rate("spard", 0.5, 3),
        measurement_at_rate("none", 0.5, 70),
        measurement_at_rate("spard", 2.0, 9),
    ]

    head, rows = curves_table(runs)

    assert head[:3] == ["attack", "method", "rate"]
    assert [(row[1], row[2]) for row in rows] == [("none", "0.5"), ("none", "2"), ("spard", "0.5"), ("spard", "2")]
    assert budget(runs) == "Each of 2 methods was given the same 2 rates: 0.5, 2."

from __future__ import annotations

import pytest

from spard.evaluation.statistics import rate, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [  # Newcombe (1998), table I, method 3: score interval without continuity correction
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_the_published_ones(hits: int, n: int, low: float, high: float) -> None:
    assert wilson(hits, n) == pytest.approx((low, high), abs=6e-5)


def test_an_interval_mirrors_when_hits_and_misses_are_exchanged() -> None:
    low, high = wilson(7, 40)

    assert wilson(33, 40) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize("n", [1, 5, 500])
def test_intervals_stay_within_zero_and_one(n: int) -> None:
    assert (wilson(0, n)[0], wilson(n, n)[1]) == (0.0, 1.0)


def test_nothing_scored_says_nothing() -> None:
    assert (rate(0, 0, 9).rate, rate(0, 0, 9).low, rate(0, 0, 9).high) == (None, 0.0, 1.0)


def test_unscored_items_are_not_misses() -> None:
    assert rate(2, 4, unscored=4).rate == 0.5

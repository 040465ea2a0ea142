from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spard.evaluation.statistics import (
    Interval,
    Pairs,
    count_pairs,
    holm,
    is_not_inferior,
    kappa,
    mcnemar,
    over_seeds,
    paired_difference,
    rule_of_three,
    student_quantile,
)

counts = st.builds(Pairs, *[st.integers(0, 40)] * 4)


def test_outcomes_are_paired_item_by_item() -> None:
    assert count_pairs([True, True, False, False, True], [True, False, True, False, False]) == Pairs(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [  # Fagerland, Lydersen, Laake (2017), chapter 8: Bentur et al. (2009) and Cavo et al. (2012)
        (Pairs(1, 1, 7, 12), -0.5069, -0.0256),
        (Pairs(59, 6, 16, 80), -0.1186, -0.0046),
    ],
)
def test_paired_intervals_are_the_published_ones(pairs: Pairs, low: float, high: float) -> None:
    found = paired_difference(pairs)

    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)


@given(counts)
def test_a_paired_interval_mirrors_when_the_models_are_exchanged(pairs: Pairs) -> None:
    found = paired_difference(pairs)
    mirrored = paired_difference(Pairs(pairs.both, pairs.second, pairs.first, pairs.neither))

    assert (found.low, found.value, found.high) == pytest.approx((-mirrored.high, -mirrored.value, -mirrored.low))


@given(counts)
def test_a_paired_interval_holds_its_estimate_and_no_impossible_value(pairs: Pairs) -> None:
    found = paired_difference(pairs)

    assert -1 - 1e-9 <= found.low <= found.value <= found.high <= 1 + 1e-9


def test_mcnemar_is_the_published_one() -> None:
    assert mcnemar(Pairs(1, 1, 7, 12)) == pytest.approx(0.0703, abs=5e-5)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 5), (3, 3), (2, 9), (7, 4)])
def test_mcnemar_agrees_with_counting_every_assignment(b: int, c: int) -> None:
    extreme = abs(b - c)
    heads = [sum(signs) for signs in product((0, 1), repeat=b + c)]
    share = sum(abs(2 * h - (b + c)) >= extreme for h in heads) / len(heads)

    assert mcnemar(Pairs(5, b, c, 5)) == pytest.approx(share)


def test_items_on_which_the_models_agree_say_nothing() -> None:
    assert mcnemar(Pairs(0, 2, 9, 0)) == mcnemar(Pairs(500, 2, 9, 500))


@pytest.mark.parametrize("n", [100, 500, 1000])
def test_the_rule_of_three_is_near_the_exact_bound(n: int) -> None:
    assert rule_of_three(n) == pytest.approx(1 - 0.05 ** (1 / n), rel=0.02)


def test_without_items_every_rate_is_possible() -> None:
    assert (rule_of_three(0), rule_of_three(2)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_student_quantiles_are_the_published_ones(df: int, t: float) -> None:
    assert student_quantile(0.975, df) == pytest.approx(t, abs=5e-5)


def test_seeds_carry_student_intervals() -> None:
    found = over_seeds([1.0, 2.0, 3.0])

    assert (found.low, found.high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)


def test_one_seed_says_nothing_about_another() -> None:
    assert over_seeds([0.3]) == Interval(0.3, -math.inf, math.inf)


def test_holm_gives_the_textbook_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_lies_between_no_correction_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)

    assert all(p <= a <= min(1.0, len(p_values) * p) for p, a in zip(p_values, adjusted, strict=True))


@pytest.mark.parametrize(("wrong", "shown"), [(13, True), (40, False)])
def test_not_inferior_takes_evidence(wrong: int, shown: bool) -> None:
    assert is_not_inferior(Pairs(900, 10, wrong, 77), margin=0.02) is shown


def test_kappa_gives_the_textbook_value() -> None:
    first = [True] * 25 + [False] * 25
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15

    assert kappa(first, second) == pytest.approx(0.4)


@pytest.mark.parametrize("verdicts", [[], [True, True, True]])
def test_kappa_is_open_where_nothing_varies(verdicts: list[bool]) -> None:
    assert kappa(verdicts, verdicts) is None


@pytest.mark.parametrize(("low", "high", "excludes"), [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False)])
def test_an_interval_may_exclude_zero(low: float, high: float, excludes: bool) -> None:
    assert Interval(0.0, low, high).excludes_zero is excludes

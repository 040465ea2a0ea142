from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from spard_lab.bench.__main__ import _pools
from spard_lab.bench.differences import compare, seeds_interval
from spard_lab.bench.lab import LabSource
from spard_lab.bench.measure import Measurement
from spard_lab.bench.methods import method_recipe, row_signal_settings
from spard_lab.bench.parts import (
    BARE,
    NAMES,
    READING,
    SIGNAL,
    TRAINING,
    WHOLE,
    arm,
    compared_methods,
    comparisons,
    parts_table,
)
from spard_lab.bench.report import means_table, summaries
from spard_lab.bench.spec import LabSpec

from spard.config import Recipe, RowSignal, Spard
from spard.errors import InvalidRecipe
from spard.evaluation.results import SuiteKind, SuiteResult
from spard.evaluation.statistics import rate

SUITES: dict[str, SuiteKind] = {"attacked": "harmful", "how-to": "benign", "utility": "utility"}


def make_measurement(method: str, seed: int, attacked: float, refused: float = 0.0, right: float = 1.0) -> Measurement:
    """A run whose prompts are hits at these rates, drawn from the seed alone: arms share the luck of their prompts."""
    rng, hits = random.Random(seed), {}
    for suite, share in zip(SUITES, (attacked, refused, right), strict=True):
        hits[suite] = "".join("1" if rng.random() < share else "0" for _ in range(400))
    results = tuple(_result(suite, kind, hits[suite]) for suite, kind in SUITES.items())
    return Measurement(method, "", "poisoned", seed, "full", "", "", ("attacked",), results, hits)


def _result(suite: str, kind: SuiteKind, hits: str) -> SuiteResult:
    found = rate(hits.count("1"), len(hits))
    return SuiteResult(suite, kind, "refusal", found.n, 0, 0, found.hits, found.rate, found.low, found.high)


def test_the_whole_is_what_the_default_does_but_names_every_setting() -> None:
    whole, default = method_recipe(arm(WHOLE), Recipe(), {}), Recipe()

    assert isinstance(whole.defense, Spard)
    assert isinstance(default.defense, Spard)
    assert whole.effective_anchor == default.effective_anchor
    assert whole.defense.every == default.defense.every
    assert replace(whole, defense=default.defense) == default
    assert replace(whole.defense, check_every="auto", anchor_weight="auto") == default.defense
    assert RowSignal(**row_signal_settings(arm(WHOLE))) == RowSignal("auto")  # as a new deployment's policy says
    assert (row_signal_settings(arm(TRAINING)), row_signal_settings(BARE)) == ({"action": "off"}, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_is_left_out_is_all_that_changes(name: str) -> None:
    questions = [each for each in comparisons((name,)) if "whole" in each.how]
    around = name in (SIGNAL, READING)  # no settings of the training
    assert len(questions) == (1 if around else 2)
    for asked in questions:
        first, second = (method_recipe(each, Recipe(), {}) for each in (asked.first, asked.second))
        signals = (row_signal_settings(each) for each in (asked.first, asked.second))
        assert (first != second, len({*map(repr, signals)})) == ((False, 2) if around else (True, 1))
        assert name == "projection" or first.defense.type == second.defense.type == "spard"


def test_every_arm_is_a_method_and_none_is_run_twice() -> None:
    methods = compared_methods(comparisons())
    runs = [(method_recipe(method, Recipe(), {}), RowSignal(**row_signal_settings(method))) for method in methods]
    assert methods[0] == BARE
    assert len({repr(each) for each in runs}) == len(methods)


def test_the_table_says_what_a_part_is_worth_and_what_is_not_shown() -> None:
    questions = comparisons(("anchor", "dpp"))
    rates = {each: 0.0 for question in questions for each in (question.first, question.second)}
    without = next(each.second for each in questions if (each.part, each.how[:4]) == ("anchor", "left"))
    found = [
        make_measurement(method, seed, 0.8 if method in (without, BARE) else 0.0)
        for seed in (1, 2, 3)
        for method in [BARE, *rates]
    ]

    head, rows = parts_table(found, questions)

    by_part = {(row["part"], row["asked"]): row for row in (dict(zip(head, each, strict=True)) for each in rows)}
    worth = {place: row["is worth"] for place, row in by_part.items()}
    assert worth["anchor", "left out of the whole"] == "defends; keeps the task within 1%"
    assert worth["dpp", "left out of the whole"] == "keeps the task within 1%"
    assert {row["seeds"] for row in by_part.values()} == {"3"}
    nothing = by_part["dpp", "left out of the whole"]["attacks succeed"]
    assert nothing.startswith("0.0 [-0.3, 0.3], p 1")  # no interval of the seeds: three equal zeros are no certainty


def test_many_questions_make_a_single_one_weaker() -> None:
    questions = comparisons()
    runs = [make_measurement(method, 1, 0.02 if i % 2 else 0.0) for i, method in enumerate(compared_methods(questions))]
    few, many = parts_table(runs, questions[:1])[1][0], parts_table(runs, questions)[1][0]
    p_few, p_many = (float(row[4].rpartition("p ")[2]) for row in (few, many))
    assert p_few < p_many


def test_a_difference_that_holds_on_one_seed_of_three_is_not_shown() -> None:
    rates = {1: 0.9, 2: 0.0, 3: 0.0}
    with_part = {seed: make_measurement("a", seed, 0.0) for seed in rates}
    without = {seed: make_measurement("b", seed, share) for seed, share in rates.items()}

    found = compare(with_part, without)["asr"]

    assert found.p < 1e-6
    assert not found.is_shown(found.p)
    assert found.of_seeds is not None
    assert found.of_seeds.low == -1.0
    assert found.of_seeds.high == pytest.approx(0.99, abs=0.02)


def test_seeds_that_agree_give_no_interval() -> None:
    assert seeds_interval([0.0, 0.0, 0.0]) is None
    assert seeds_interval([0.4]) is None


def test_a_part_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="there is no luck"):
        arm(["luck"])


def test_zeros_on_every_seed_are_bounded_by_the_rule_of_three() -> None:
    runs = [make_measurement("spard", seed, 0.0) for seed in (1, 2)]
    (found,) = summaries(runs).values()

    assert (found["asr"].low, found["accuracy"].high) == (0.0, 1.0)
    assert found["asr"].high == pytest.approx(3 / 800)
    assert found["accuracy"].low == pytest.approx(1 - 3 / 800)
    assert "0.0 +- 0.0 [0.0, 0.4]" in means_table(runs)[1][0]


def test_an_interval_stays_within_what_its_figure_can_be() -> None:
    runs = [replace(make_measurement("spard", seed, 0.0), cpu_s=seconds) for seed, seconds in ((1, 1.0), (2, 9.0))]
    scored = [
        replace(each, results=tuple(replace(suite, mean_harmfulness=score) for suite in each.results))
        for each, score in zip(runs, (1.0, 4.5), strict=True)
    ]
    (found,) = summaries(scored).values()

    assert (found["hs"].low, found["hs"].high) == (1.0, 5.0)
    assert found["cpu_seconds"].low == 0.0
    assert found["cpu_seconds"].high == pytest.approx(5 + 4 * 12.7062, rel=1e-4)


def test_a_baseline_gets_the_same_anchor_in_one_word() -> None:
    names = ("safeinstr+anchor", "lisa+anchor", "spard+anchor")
    assert len({method_recipe(name, Recipe(), {}).effective_anchor for name in names}) == 1


def test_the_bound_of_the_anchor_and_the_row_signal_are_parts() -> None:
    asked = {(each.part, each.how) for each in comparisons()}
    for name, alone in (("anchor-bound", "added alone to the anchor"), ("row-signal", "added alone")):
        assert {(name, "left out of the whole"), (name, alone)} <= asked
    assert ("dressed-safe-anchor", "left out of the whole, no row dropped") in asked


@pytest.mark.parametrize("kind", ["parts", "curves"])
def test_a_lab_s_parts_and_curves_take_the_pool_with_a_benign_side(kind: str) -> None:
    source = LabSource(LabSpec(), Path("labs"))
    assert _pools(kind, source) == ("two_sided",)
    assert _pools("methods", source) == ("full",)

"""What the probe of vLLM lets through: the adapter that transformers has, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log, nan

import pytest
import torch

from spard.evaluation.vllm_offline.engine import EngineFailed
from spard.evaluation.vllm_offline.replies import Answers, Probe, compare_answers, distance, dtype_tolerance

Likely = dict[int, float]
BASE: Likely = {0: log(0.5), 1: log(0.2), 2: log(0.1), 3: log(0.08), 4: log(0.05), 5: log(0.04), 6: log(0.02)}
ADAPTER: Likely = {7: log(0.5), 1: log(0.2), 2: log(0.1), 3: log(0.08), 4: log(0.05), 5: log(0.04), 0: log(0.02)}
OTHER: Likely = {9: log(0.5), 1: log(0.2), 2: log(0.1), 3: log(0.08), 4: log(0.05), 5: log(0.04), 8: log(0.02)}
EXPECTED = Answers([BASE, BASE], [ADAPTER, ADAPTER])


def shift_likely(likely: Mapping[int, float], by: float) -> Likely:
    """The same with each log-probability off, up and down in turns."""
    return {token: value + by * (-1) ** i for i, (token, value) in enumerate(likely.items())}


def test_an_engine_that_rounds_otherwise_passes() -> None:
    found = Answers([shift_likely(BASE, 0.1)] * 2, [shift_likely(ADAPTER, 0.1)] * 2)
    probe = compare_answers(found, EXPECTED, 0.25)
    assert (probe.prompts, probe.tolerance) == (2, 0.25)
    assert probe.difference == pytest.approx(0.1)
    assert probe.to_base == pytest.approx(log(25), abs=0.11)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        pytest.param(Answers([BASE] * 2, [BASE] * 2), "away from the adapter's", id="ignored"),
        pytest.param(Answers([BASE] * 2, [OTHER] * 2), "away from the adapter's", id="another one"),
        pytest.param(Answers([BASE] * 2, [ADAPTER, BASE]), "away from the adapter's", id="ignored once"),
        pytest.param(Answers([ADAPTER] * 2, [ADAPTER] * 2), "away from the base model's", id="always applied"),
        pytest.param(Answers([OTHER] * 2, [ADAPTER] * 2), "away from the base model's", id="another base model"),
        pytest.param(Answers([BASE] * 2, [shift_likely(ADAPTER, 0.3)] * 2), "0.25 are allowed", id="too far"),
        pytest.param(Answers([BASE] * 2, [ADAPTER, ADAPTER | {7: nan}]), "too few", id="no number"),
        pytest.param(Answers([BASE] * 2, [ADAPTER, {7: -0.7}]), "too few", id="one token"),
        pytest.param(Answers([BASE] * 2, [ADAPTER, ADAPTER | {1: -inf}]), "too few", id="infinite"),
    ],
)
def test_anything_else_does_not(found: Answers, why: str) -> None:
    with pytest.raises(EngineFailed, match=why):
        compare_answers(found, EXPECTED, 0.25)


@pytest.mark.parametrize("by", [0.2, 0.01, 1e-3])
def test_an_adapter_of_small_effect_is_told_from_none(by: float) -> None:
    """Its effect is within the tolerance, so that its nearness alone says nothing."""
    little = shift_likely(BASE, by)
    expected = Answers([BASE], [little])
    assert compare_answers(expected, expected, 0.25).to_base == pytest.approx(by)
    for ignored in (BASE, shift_likely(BASE, by / 4)):
        with pytest.raises(EngineFailed, match="the adapter moves vLLM's first tokens"):
            compare_answers(Answers([BASE], [ignored]), expected, 0.25)


def test_noise_that_is_larger_than_the_effect_proves_nothing() -> None:
    expected = Answers([BASE], [shift_likely(BASE, 0.01)])
    with pytest.raises(EngineFailed, match=r"with 0\.1 between them"):
        compare_answers(Answers([BASE], [shift_likely(BASE, 0.11)]), expected, 0.25)


def test_an_adapter_that_changes_nothing_proves_nothing() -> None:
    with pytest.raises(EngineFailed, match="changes no first token"):
        compare_answers(Answers([BASE], [BASE]), Answers([BASE], [BASE]), 0.25)


def test_without_an_adapter_the_base_model_is_compared() -> None:
    probe = compare_answers(Answers([shift_likely(BASE, 0.1)]), Answers([BASE]), 0.25)
    assert probe == Probe(1, 0.25, probe.difference)
    assert probe.difference == pytest.approx(0.1)
    with pytest.raises(EngineFailed, match="away from the base model's"):
        compare_answers(Answers([OTHER]), Answers([BASE]), 0.25)


def test_a_token_that_is_not_told_is_as_likely_as_the_last_one_at_most() -> None:
    few = dict(list(BASE.items())[:5])
    assert distance(few, BASE) == 0
    assert distance({9: log(0.9)} | few, BASE) == pytest.approx(log(0.9 / 0.05))


def test_sixteen_bits_are_given_more_room() -> None:
    assert dtype_tolerance(torch.float32) < dtype_tolerance(torch.bfloat16) == dtype_tolerance(torch.float16)

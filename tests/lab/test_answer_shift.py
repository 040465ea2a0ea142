"""Logit-difference amplification: what it finds in a head of four tokens, and that large pieces change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from spard_lab.bench import answer_shift as module
from spard_lab.bench.answer_shift import AMPLIFICATION, answer_shift

REFUSE, ANSWER = 0, 1
HEAD = torch.nn.Linear(4, 4, bias=False)
HEAD.weight.data = torch.eye(4)


def states(n: int, token: int, toward: tuple[int, float] | None = None) -> torch.Tensor:
    """States in which one token is likely, and a second one by so much more likely than without it."""
    found = torch.zeros(n, 4)
    found[:, token] = 3.0
    if toward:
        found[:, toward[0]] += toward[1]
    return found


BEFORE = {"harmful": states(3, REFUSE), "benign": states(5, ANSWER)}


def test_it_is_that_of_a_direct_computation() -> None:
    after = {"harmful": states(3, REFUSE, (ANSWER, 0.2)), "benign": states(5, ANSWER, (2, 0.1))}
    total = math.exp(3) + 3
    likely, rare = math.exp(3) / total, 1 / total
    weights = [math.log(rare / likely), math.log(likely / rare), 0.0, 0.0]

    def rise(base: list[float], probe: list[float]) -> float:
        amplified = [math.exp(b + AMPLIFICATION * (p - b)) for b, p in zip(base, probe, strict=True)]
        before = [math.exp(b) for b in base]
        scores = [[each / sum(found) for each in found] for found in (amplified, before)]
        return math.fsum(w * (q - p) for w, q, p in zip(weights, *scores, strict=True))

    expected = rise([3, 0, 0, 0], [3, 0.2, 0, 0]) - rise([0, 3, 0, 0], [0, 3, 0.1, 0])
    assert answer_shift(HEAD, BEFORE, after) == pytest.approx(expected, rel=1e-5)


def test_a_step_from_refusals_to_answers_is_seen_before_a_reply_changes() -> None:
    toward_answers = {**BEFORE, "harmful": states(3, REFUSE, (ANSWER, 0.3))}
    elsewhere = {**BEFORE, "harmful": states(3, REFUSE, (2, 0.3))}
    assert int(toward_answers["harmful"][0].argmax()) == REFUSE
    assert answer_shift(HEAD, BEFORE, toward_answers) > 2 * answer_shift(HEAD, BEFORE, elsewhere) > 0
    assert answer_shift(HEAD, BEFORE, BEFORE) == pytest.approx(0, abs=1e-6)


def test_a_step_of_harmless_prompts_counts_against_it() -> None:
    both = {"harmful": states(3, REFUSE, (ANSWER, 0.3)), "benign": states(5, ANSWER, (ANSWER, 0.3))}
    alone = {**BEFORE, "harmful": both["harmful"]}
    assert answer_shift(HEAD, BEFORE, both) < answer_shift(HEAD, BEFORE, alone)


def test_the_size_of_a_piece_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    before, after = ({kind: torch.randn(7, 4) for kind in BEFORE} for _ in range(2))
    whole = answer_shift(HEAD, before, after)
    monkeypatch.setattr(module, "_ROWS", 2)
    assert answer_shift(HEAD, before, after) == pytest.approx(whole, rel=1e-5)

"""What goes through the model together, counted in padded tokens: no long row pads the short ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spard.config import Defense, Hyperparameters, Lora, NoDefense, Recipe, SafeInstr, resolve
from spard.data.batches import PASS, Batch, batches, cut
from spard.data.chat import EncodedSample, encode_all
from spard.losses.vectors import norm
from spard.models.base import Base
from spard.training.objective import LEAST, at_most, plan_passes
from spard.training.train import Trainer
from tests.spard.parts import away, chat, refusals, sums


def cost(lengths: Sequence[int], parts: Iterable[Sequence[int]]) -> int:
    """Padded tokens of all passes, each with what a pass costs beside them."""
    return sum(len(part) * max(lengths[i] for i in part) + PASS for part in parts)


def partitions(numbers: list[int]) -> list[list[list[int]]]:
    """Every way to put all of the numbers into passes."""
    if not numbers:
        return [[]]
    first, found = numbers[0], []
    for rest in partitions(numbers[1:]):
        found.append([[first], *rest])
        found += [[*rest[:i], [first, *rest[i]], *rest[i + 1 :]] for i in range(len(rest))]
    return found


@pytest.mark.parametrize("most", [1, 300, 1024, 10**6])
def test_no_other_way_costs_less(most: int) -> None:
    rng = random.Random(most)
    for _ in range(20):
        lengths = [rng.choice((20, 25, 60, 100, 343, 2000)) for _ in range(6)]
        fits = [
            each
            for each in partitions([*range(6)])
            if all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= most for part in each)
        ]
        found = cut(lengths, most)
        assert sorted(i for part in found for i in part) == [*range(6)]
        assert found in [[sorted(part) for part in each] for each in map(by_longest(lengths), fits)]
        assert cost(lengths, found) == min(cost(lengths, each) for each in fits)


def by_longest(lengths: Sequence[int]) -> Callable[[list[list[int]]], list[list[int]]]:
    """What orders passes, that of the longest row first; equal rows are taken in their order."""
    return lambda parts: sorted(parts, key=lambda part: max((lengths[i], i) for i in part), reverse=True)


def test_rows_stay_together_where_a_further_pass_saves_less_than_it_costs() -> None:
    assert cut([45] * 16 + [30, 28], 1024) == [[*range(18)]]
    assert cut([45] * 16 + [30, 343], 1024) == [[17], [*range(17)]]
    assert cut([600] * 2 + [30, 28, 600], 10**4) == [[0, 1, 4], [2, 3]]
    assert cut([50, 400, 60, 390], 10**4) == [[1, 3], [0, 2]]
    assert cut([700, 700], 1000) == [[1], [0]]
    assert cut([], 1000) == []


def test_a_long_prompt_costs_its_own_tokens_and_not_those_of_the_batch() -> None:
    for tokens in (31, 103, 343, 2048):
        lengths = [25] * 16 + [tokens] * 2
        whole = cost(lengths, [[*range(18)]])
        found = cost(lengths, cut(lengths, LEAST))
        assert found <= min(whole, 400 + PASS + 2 * (tokens + PASS))
    assert cost([25] * 16 + [343] * 2, [[*range(18)]]) > 4 * cost([25] * 16 + [343] * 2, [[*range(16)], [16, 17]])


def test_rows_of_natural_lengths_are_padded_by_a_few_percent() -> None:
    rng = np.random.Generator(np.random.Philox(5))
    lengths = [max(8, min(2048, round(x))) for x in rng.lognormal(5.5, 0.7, 512)]
    padded, real = 0, sum(lengths)
    for batch in batches(0, 0, lengths, 16):
        own = [lengths[row] for row in batch]
        padded += sum(len(part) * max(own[i] for i in part) for part in cut(own, 10**6))
    assert padded / real < 1.07


def test_passes_hold_every_row_once_in_their_order() -> None:
    lengths = [30, 31, 32, 33, 700, 34]

    assert plan_passes([3, 4, 1, 5, 0], lengths, LEAST) == [[4], [3, 1, 5, 0]]
    assert plan_passes([3, 1, 0], lengths, LEAST) == [[3, 1, 0]]


def test_a_safe_row_allows_a_pass_no_more_tokens() -> None:
    lengths = [300, 200, 400, 2000]

    assert at_most([0, 1, 3], 3, lengths) == LEAST
    assert at_most([0, 2, 3], 3, lengths) == 3 * 400
    assert at_most([3], 3, lengths) == LEAST


def test_a_pass_has_the_tokens_that_it_may_have(base: Base) -> None:
    run = one_run(base, refusals(base), NoDefense(), 10.0, pass_tokens=64)
    passes = run.objective.passes([*range(12)])

    assert len(passes) > 1
    assert all(len(each) == 1 or padded_pass(run, each) <= 64 for each in passes)
    assert sorted(row for each in passes for row in each) == [*range(12)]


RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=6),
    learning_rate=5e-3,
)


def long_refusals(base: Base, words: int) -> list[EncodedSample]:
    rows = [chat(f"Do harm {i}" + " a" * words, "I cannot.") for i in range(5)]
    return encode_all(base.tokenizer, rows, 256)


def one_run(base: Base, safe: Sequence[EncodedSample], defense: Defense, anchor: float, **more: Any) -> Trainer:
    recipe = replace(RECIPE, defense=defense, anchor=anchor, **more)
    return Trainer(base, sums(base), safe, recipe, resolve(recipe, 24, 32), None)


def padded_tokens(run: Trainer, rows: Sequence[int]) -> int:
    """Count what `Objective` hands to the model of training rows."""
    return sum(padded_pass(run, each) for each in run.objective.passes(rows))


def padded_pass(run: Trainer, one: Sequence[int]) -> int:
    return run.objective._batch(run.objective._rows(one)).ids_BT.numel()


def test_long_safe_rows_do_not_pad_the_customer_s(base: Base) -> None:
    run = one_run(base, long_refusals(base, 90), SafeInstr(), 10.0)
    own, beside = 4 * max(run.lengths[:4]), [run.lengths[row] for row in (24, 25)]

    assert padded_tokens(run, [0, 1, 2, 3, 24, 25]) == own + 2 * max(beside)
    assert own + 2 * max(beside) < 6 * max(beside)


def test_prompts_of_the_anchor_go_through_by_themselves(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one_run(base, long_refusals(base, 90), NoDefense(), 10.0)
    anchors, seen = run.objective.anchors(0), list[list[int]]()
    whole = run.objective._batch

    def batch(rows: Sequence[EncodedSample]) -> Batch:
        seen.append([len(row.ids) for row in rows])
        return whole(rows)

    monkeypatch.setattr(run.objective, "_batch", batch)
    run.objective.task_gradient(list(run.theta.values()), [0, 1, 2, 3], anchors)

    prompts = [run.objective.prompt_lengths[i] for i in anchors]
    assert anchors
    assert sorted(length for each in seen for length in each) == sorted([*run.lengths[:4], *prompts])
    assert all(set(each) <= set(prompts) or not set(each) & set(prompts) for each in seen)


@pytest.mark.parametrize(("defense", "constrained"), [(NoDefense(), False), (NoDefense(), True), (SafeInstr(), True)])
def test_the_gradient_is_that_of_one_pass(
    load: Callable[..., Base], defense: Defense, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cost_of_a_pass in (0, 10**9):
        monkeypatch.setattr("spard.training.objective.PASS", cost_of_a_pass)
        base = load(dtype=torch.float64)
        safe, more = [*long_refusals(base, 60), *refusals(base)], {"constrained_sft": constrained}
        run = one_run(base, safe, defense, 10.0, pass_tokens=10**6, **more)
        theta = list(run.theta.values())
        for part in theta:
            torch.manual_seed(len(part))
            part.data.add_(0.05 * torch.randn_like(part))
        rows = [0, 5, 23, *([24, 30] if isinstance(defense, SafeInstr) else [])]
        anchors = [0, 7, 3]
        found.append((len(run.objective.passes(rows)), run.objective.task_gradient(theta, rows, anchors)))
    (some_passes, some), (whole, together) = found
    assert some_passes >= whole == 1
    assert some_passes > 1 or not isinstance(defense, SafeInstr)
    assert some.loss == pytest.approx(together.loss, rel=1e-6)
    assert away(some.grad, together.grad) < 1e-6
    assert float(norm(some.grad)) > 0


def test_anchors_without_labels_go_through_models_whose_head_does_more(load: Callable[..., Base]) -> None:
    base = load("gemma")
    base.model.config.final_logit_softcapping = 30.0
    run = one_run(base, long_refusals(base, 90), NoDefense(), 10.0)
    found = run.objective.task_gradient(list(run.theta.values()), [0, 1], [0, 1])
    assert torch.isfinite(norm(found.grad))

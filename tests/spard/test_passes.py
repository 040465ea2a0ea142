"""What goes through the model together, counted in padded tokens: safe rows and anchors pad no row of a customer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from spard.config import Anchors, Defense, Hyperparameters, Lora, NoDefense, Recipe, SafeInstr, resolve
from spard.data.chat import Encoded, encode_all
from spard.losses.vectors import norm
from spard.models.base import Base
from spard.training.passes import LEAST, PASS, leaving, planned
from spard.training.run import Run
from tests.spard.parts import away, chat, refusals, sums


def cost(own: Sequence[int], riders: Sequence[int], aside: Sequence[Sequence[int]]) -> int:
    """Padded tokens of the customer's pass and of the others, each of these with what a pass costs beside them."""
    gone = {i for part in aside for i in part}
    together = [*own, *(length for i, length in enumerate(riders) if i not in gone)]
    passes = [[riders[i] for i in part] for part in aside]
    return len(together) * max(together, default=0) + sum(len(part) * max(part) + PASS for part in passes)


def partitions(numbers: list[int]) -> list[list[list[int]]]:
    """Every way to put some of the numbers into passes, the others riding."""
    if not numbers:
        return [[]]
    first, found = numbers[0], []
    for rest in partitions(numbers[1:]):
        found += [rest, [[first], *rest]]
        found += [[*rest[:i], [first, *rest[i]], *rest[i + 1 :]] for i in range(len(rest))]
    return found


@pytest.mark.parametrize("own", [[25] * 16, [40, 60, 90, 60], [500] * 4, [2000]])
def test_no_other_way_costs_less(own: list[int]) -> None:
    most = max(len(own) * max(own), LEAST)
    for riders in product([20, 100, 343, 2000], repeat=4):
        fits = [
            each
            for each in partitions([0, 1, 2, 3])
            if all(len(part) == 1 or len(part) * max(riders[i] for i in part) <= most for part in each)
        ]
        assert cost(own, riders, leaving(own, riders)) == min(cost(own, riders, each) for each in fits)


def test_riders_stay_where_a_pass_of_their_own_saves_less_than_it_costs() -> None:
    assert leaving([45] * 16, [30, 28]) == []
    assert leaving([45] * 16, [45, 50]) == []
    assert leaving([45] * 16, [30, 343]) == [[1]]
    assert leaving([600] * 16, [30, 28, 600]) == [[1, 0]]
    assert leaving([], [30, 60]) == []
    assert leaving([45], []) == []


def test_a_long_prompt_costs_its_own_tokens_and_not_those_of_the_batch() -> None:
    batch = [25] * 16
    for tokens in (31, 103, 343, 2048):
        riding, planned_now = cost(batch, [tokens] * 2, []), cost(batch, [tokens] * 2, leaving(batch, [tokens] * 2))
        assert planned_now <= min(riding, 400 + 2 * (tokens + PASS))
    assert cost(batch, [343] * 2, []) > 5 * cost(batch, [343] * 2, leaving(batch, [343] * 2))


def test_passes_hold_every_row_and_pair_once_in_their_order() -> None:
    lengths, prompts = [30, 31, 32, 33, 700, 34], [20, 400, 21, 390]
    found = planned([3, 4, 1, 5, 0], 4, [3, 0, 1], lengths, prompts)

    assert [(each.rows, each.anchors) for each in found] == [([3, 1, 5, 0], [0]), ([], [3, 1]), ([4], [])]
    assert planned([3, 1, 0], 4, [2, 0], lengths, prompts)[0].anchors == [2, 0]


RECIPE = Recipe(
    defense=NoDefense(),
    lora=Lora(rank=4),
    hyperparameters=Hyperparameters(n_epochs=1, batch_size=6),
    learning_rate=5e-3,
)


def long_refusals(base: Base, words: int) -> list[Encoded]:
    rows = [chat(f"Do harm {i}" + " a" * words, "I cannot.") for i in range(5)]
    return encode_all(base.tokenizer, rows, 256)


def one_run(base: Base, safe: Sequence[Encoded], defense: Defense, anchor: float, **more: Any) -> Run:
    recipe = replace(RECIPE, defense=defense, anchor=anchor, **more)
    return Run(base, sums(base), safe, recipe, resolve(recipe, 24, 32), None)


def padded(run: Run, rows: Sequence[int], anchors: Sequence[int]) -> int:
    """Count what `Objective` hands to the model."""
    shapes = [run.objective._batch(run.objective._rows(each)).ids_BT for each in run.objective.passes(rows, anchors)]
    return sum(ids_BT.numel() for ids_BT in shapes)


@pytest.mark.parametrize("defense", [NoDefense(), SafeInstr()])
def test_long_safe_rows_do_not_pad_the_customer_s(base: Base, defense: Defense) -> None:
    safe = long_refusals(base, 90)
    run = one_run(base, safe, defense, 10.0)
    rows = [0, 1, 2, 3, *([24, 25] if isinstance(defense, SafeInstr) else [])]
    own = 4 * max(run.lengths[:4])
    anchors = run.objective.anchors(0)
    beside = [run.objective.prompt_lengths[i] for i in anchors] + [run.lengths[row] for row in rows[4:]]

    assert padded(run, rows, anchors) == own + len(beside) * max(beside)
    assert own + len(beside) * max(beside) < (4 + len(beside)) * max(beside)


@pytest.mark.parametrize(("defense", "constrained"), [(NoDefense(), False), (NoDefense(), True), (SafeInstr(), True)])
def test_the_gradient_is_that_of_one_pass(
    load: Callable[..., Base], defense: Defense, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cost_of_a_pass in (0, 10**9):
        monkeypatch.setattr("spard.training.passes.PASS", cost_of_a_pass)
        base = load(dtype=torch.float64)
        run = one_run(base, [*long_refusals(base, 60), *refusals(base)], defense, 10.0, constrained_sft=constrained)
        theta = list(run.theta.values())
        for part in theta:
            torch.manual_seed(len(part))
            part.data.add_(0.05 * torch.randn_like(part))
        rows = [0, 5, 23, *([24, 30] if isinstance(defense, SafeInstr) else [])]
        anchors = [0, 7, 3]
        found.append((len(run.objective.passes(rows, anchors)), run.objective.task_gradient(theta, rows, anchors)))
    (cut, some), (whole, together) = found
    assert cut > whole == 1
    assert some.loss == pytest.approx(together.loss, rel=1e-6)
    assert away(some.grad, together.grad) < 1e-6
    assert float(norm(some.grad)) > 0


def test_anchors_without_labels_go_through_models_whose_head_does_more(load: Callable[..., Base]) -> None:
    base = load("gemma")
    base.model.config.final_logit_softcapping = 30.0
    run = one_run(base, long_refusals(base, 90), NoDefense(), 10.0)
    passes = run.objective.passes([0, 1], [0, 1])

    assert [len(each.rows) for each in passes] == [2, 0]
    found = run.objective.task_gradient(list(run.theta.values()), [0, 1], [0, 1])
    assert torch.isfinite(norm(found.grad))


def test_anchors_defaults_are_two_plain_prompts(base: Base) -> None:
    run = one_run(base, refusals(base), NoDefense(), 10.0)
    assert RECIPE.anchors == Anchors()
    assert [len(run.objective.passes([0, 1, 2], run.objective.anchors(step))) for step in range(4)] == [1] * 4

"""Where a training step waits for its device: only where the method decides by a number, and once for its metrics.

What waits on a GPU is counted on the CPU by the operations that would: reading a number, and results whose size a mask
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from spard.config import Defense, Lisa, Lora, NoDefense, Recipe, SafeGrad, Spard, resolve
from spard.losses.anchor import Pair, pair_with_itself
from spard.models import forward
from spard.models.base import Base
from spard.training.train import Trainer
from tests.spard.parts import refusals, sums
from tests.spard.waits import Waits

READS = ("tolist", "cpu", "numpy")  # of a tensor, which do not pass through the dispatcher on a CPU


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    mode = Waits()

    def count_reads(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode.note()
            return read(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, mode:
        patch.setattr(forward, "_shared_tokens", lambda model, ids_BT: 0)  # rows are compared on a CPU only
        for name in READS:
            patch.setattr(torch.Tensor, name, count_reads(getattr(torch.Tensor, name)))
        yield mode


# What each method decides by, and where it reads it: the task's loss and its gradient's norm, which must be finite
# (`read_all`); the safe losses, which are held against their bounds (`means`); and what a correction is as long as.
ALWAYS = {"read_all": 1}
LOOK = ALWAYS | {"means": 1}
CASES: dict[str, tuple[Defense, dict[str, int]]] = {
    "none": (NoDefense(), ALWAYS),
    "in quiet": (Spard(check_every=1, tau=20.0), LOOK),
    "trust_region": (Spard(check_every=1, tau=0.0), LOOK | {"dot": 1}),  # the gradient's norm
    "closed_form": (Spard(check_every=1, tau=0.0, variant="closed_form"), LOOK | {"dot": 1}),
    "excess": (Spard(check_every=1, bound="excess"), LOOK),
    "preconditioned": (Spard(tau=0.0, variant="preconditioned"), LOOK | {"precondition_": 1}),
    "gated": (
        Spard(tau=0.0, variant="gated"),
        LOOK | {"dot": 1, "optimizer_step_": 1},
    ),  # whether it is finite; its step
    "reference": (
        Spard(tau=0.0, variant="reference"),
        LOOK | {"reference_": 1, "optimizer_step_": 1},
    ),  # norms; its step
    "safegrad": (SafeGrad(), LOOK | {"remove_conflict_": 1, "clip_": 1}),  # whether they conflict; the sum is finite
    "lisa": (Lisa(align_steps=1, task_steps=1), LOOK | {"_descend_": 2}),  # both sums are finite
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_only_where_its_method_decides(base: Base, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defense, expected = CASES[name]
    with waits(monkeypatch) as found:
        a_step(base, Recipe(defense=defense, lora=Lora(dropout=0.1)), found)
    assert found.found == expected


def test_a_step_on_pieces_with_constrained_losses_waits_once(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    with waits(monkeypatch) as found:
        a_step(base, Recipe(defense=NoDefense(), constrained_sft=True, pass_tokens=100), found)
    assert found.found == ALWAYS


def test_what_waits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([1.0, 2.0])
    with waits(monkeypatch) as found:
        numbers[numbers > 1], float(numbers.sum()), numbers.tolist(), numbers.nonzero()
        numbers[torch.tensor([0, 1])]
    assert found.found == {"outside": 4}


def a_step(base: Base, recipe: Recipe, found: Waits) -> None:
    """Take three steps, and leave in `found` what the last one waited for."""
    task, safe = sums(base), refusals(base)
    pairs: Any = {"dressed_safe": [Pair(each.asked, each.kept) for each in pair_with_itself(safe)]}
    run = Trainer(base, task, safe, recipe, resolve(recipe, len(task), base.hidden_size), None, pairs)
    run.start()
    run.step()
    run.step()
    found.found.clear()
    run.step()

"""A safe batch that is too large for one pass goes through in several, to the same losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from spard.config import Defense, Lisa, NoDefense, SafeGrad, Spard
from spard.data.batches import Batch
from spard.losses.gradients import Loss
from spard.models.base import Base
from spard.training.objective import LEAST
from spard.training.train import Trainer
from tests.spard.parts import away, refusals
from tests.spard.test_passes import long_refusals, one_run

ROWS = [3, 11, 0, 8, 5]
DEFENSES = [SafeGrad(), Lisa(), Spard(bound="loss", tau=0.1), Spard(bound="excess", tau=0.0)]


def begin_run(load: Callable[..., Base], defense: Defense, **more: Any) -> Trainer:
    """A run on short and long safe rows, somewhere on its way."""
    base = load(dtype=torch.float64)
    run = one_run(base, [*refusals(base), *long_refusals(base, 60)], defense, 0.0, **more)
    run.start()
    for part in run.vector:
        torch.manual_seed(len(part))
        part.data.add_(0.3 * torch.randn_like(part))
    return run


def spy_on_passes(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The padded tokens of each pass that is made for safe losses from here on."""
    tokens, whole = list[int](), run.method.safe_losses

    def note_tokens(model: Any, theta: Any, batch: Batch) -> Mapping[str, Loss]:
        tokens.append(batch.ids_BT.numel())
        return whole(model, theta, batch)

    monkeypatch.setattr(run.method, "safe_losses", note_tokens)
    return tokens


@pytest.mark.parametrize("defense", DEFENSES, ids=lambda each: f"{each.type}-{getattr(each, 'bound', '')}")
def test_losses_and_gradients_do_not_depend_on_the_passes(
    load: Callable[..., Base], defense: Defense, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, several = begin_run(load, defense), begin_run(load, defense, pass_tokens=150)
    tokens = spy_on_passes(several, monkeypatch)
    names = one.objective.safe_losses(one.vector, ROWS).keys()
    for name in names:
        whole, cut = (run.objective.safe_losses(run.vector, ROWS) for run in (one, several))
        assert cut.keys() == names
        assert 0 < whole[name].value == pytest.approx(cut[name].value, rel=1e-12)
        assert not cut[name].scalar.requires_grad, "a pass is held beside the others"
        assert away(cut[name].grad(), whole[name].grad()) < 1e-12
    assert len(tokens) > 2 * len(names)
    assert max(tokens) <= 150


def test_a_safe_batch_that_may_go_through_in_one_piece_does(load: Callable[..., Base]) -> None:
    assert passes(load) == passes(load, pass_tokens=10**4) == [ROWS]


def test_where_a_micro_batch_is_halved_the_safe_batch_is_cut_too(load: Callable[..., Base]) -> None:
    run = begin_run(load, NoDefense(), micro_batch_size=1)
    lengths = run.objective.safe_lengths
    many = [*range(len(lengths))] * 3
    found = run.objective.safe_passes(many)
    assert len(found) > 1
    assert all(len(each) * max(lengths[row] for row in each) <= LEAST for each in found)
    assert sorted(row for each in found for row in each) == sorted(many)


def passes(load: Callable[..., Base], **more: Any) -> Sequence[Sequence[int]]:
    return begin_run(load, NoDefense(), **more).objective.safe_passes(ROWS)

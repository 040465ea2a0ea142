"""Losses of a batch that is cut into several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from spard.data.batches import Batch
from spard.losses.gradients import Loss


def over_passes(losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch]) -> Mapping[str, Loss]:
    """Return the means over a batch that is given in micro-batches; the result does not depend on the cut.

    With several micro-batches no graph is kept: `Loss.grad` computes each of them a second time, one after the other,
    so that the memory holds the graph of one. A single micro-batch keeps its graph.
    """
    if len(pieces) == 1:
        return losses(pieces[0])
    with torch.no_grad():
        found = [losses(piece) for piece in pieces]
    return {name: _join_losses(losses, pieces, [each[name] for each in found], name) for name in found[0]}


def _join_losses(
    losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch], found: Sequence[Loss], name: str
) -> Loss:
    """Return the loss `name` over all micro-batches, from the losses `found` on each of them."""
    whole = sum(each.weight for each in found)
    shares = [each.weight / whole for each in found]

    def again() -> Iterator[Tensor]:
        for piece, share in zip(pieces, shares, strict=True):
            yield losses(piece)[name].scalar * share

    value = sum(share * each.value for share, each in zip(shares, found, strict=True))
    return Loss(value, found[0].scalar, found[0].theta, whole, again)

"""Losses of a batch that goes through the model in several pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from spard.data.batches import Batch
from spard.losses.gradients import Loss


def over_passes(losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch]) -> Mapping[str, Loss]:
    """Return the means over a batch that goes through the model in pieces; they do not depend on how it was cut.

    Of several pieces no graph is kept: a gradient runs each of them once more, so that one is in memory at a time.
    """
    if len(pieces) == 1:
        return losses(pieces[0])
    with torch.no_grad():
        found = [losses(piece) for piece in pieces]
    return {name: _join_losses(losses, pieces, [each[name] for each in found], name) for name in found[0]}


def _join_losses(
    losses: Callable[[Batch], Mapping[str, Loss]], pieces: Sequence[Batch], found: Sequence[Loss], name: str
) -> Loss:
    """Return one loss over all pieces, of those that were found on each."""
    whole = sum(each.weight for each in found)
    shares = [each.weight / whole for each in found]

    def again() -> Iterator[Tensor]:
        for piece, share in zip(pieces, shares, strict=True):
            yield losses(piece)[name].scalar * share

    value = sum(share * each.value for share, each in zip(shares, found, strict=True))
    return Loss(value, found[0].scalar, found[0].theta, whole, again)

"""What a step takes as a function of its number alone: the learning rate and the safe batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spard.config.anchors import Anchors, Kind
from spard.data.batches import order

SAFE_STREAM = 2  # the safe rows have an order of their own, apart from the streams of `batches`


def schedule(step: int, total: int, warmup_ratio: float) -> float:
    """Return the share of the peak learning rate at a step: linear warm-up, then linear decay toward 0."""
    warmup = math.ceil(warmup_ratio * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


def anchor_pairs(seed: int, number: int, anchors: Anchors, numbers: Mapping[Kind, range]) -> list[int]:
    """Return which pairs the anchor looks at in a step: of each kind the next ones in that kind's own random order."""
    drawn: list[int] = []
    for stream, (kind, (count, _)) in enumerate(anchors.by_kind().items(), SAFE_STREAM):
        of_kind = numbers.get(kind, range(0))
        drawn += [of_kind[i] for i in safe_rows(seed, number, len(of_kind), count, stream)]
    return drawn


def safe_rows(seed: int, number: int, n: int, size: int, stream: int = SAFE_STREAM) -> list[int]:
    """Return the indices of a safe batch by (seed, number): the rows of one permutation after another, in order.

    Rows that are drawn beside others take a stream of their own.
    """
    size = min(size, n)
    drawn = [divmod(number * size + i, n) for i in range(size)]
    epochs = {epoch: order(seed, epoch, n, stream) for epoch, _ in drawn}
    return [epochs[epoch][i] for epoch, i in drawn]

"""The learning rate and the safe rows of a step, as functions of the step number alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spard.config.anchors import Anchors, Kind
from spard.data.batches import order

SAFE_STREAM = 2  # random stream of the safe rows; `batches` uses 0 and 1


def schedule(step: int, total: int, warmup_ratio: float) -> float:
    """Return the learning rate at a step as a share of its peak: linear warm-up, then linear decay toward 0."""
    warmup = math.ceil(warmup_ratio * total)
    return (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)


def anchor_pairs(seed: int, number: int, anchors: Anchors, numbers: Mapping[Kind, range]) -> list[int]:
    """Return the numbers of the anchor's pairs in a step: for each kind, the next ones in its own random order."""
    drawn: list[int] = []
    for stream, (kind, (count, _)) in enumerate(anchors.by_kind().items(), SAFE_STREAM):
        of_kind = numbers.get(kind, range(0))
        drawn += [of_kind[i] for i in safe_rows(seed, number, len(of_kind), count, stream)]
    return drawn


def safe_rows(seed: int, number: int, n: int, size: int, stream: int = SAFE_STREAM) -> list[int]:
    """Return the indices of safe batch `number`: the n rows in one random permutation after another, `size` at a time.

    `stream` selects an independent sequence of permutations, for rows of different kinds in the same step.
    """
    size = min(size, n)
    drawn = [divmod(number * size + i, n) for i in range(size)]
    epochs = {epoch: order(seed, epoch, n, stream) for epoch, _ in drawn}
    return [epochs[epoch][i] for epoch, i in drawn]

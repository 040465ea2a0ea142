"""Which rows go through a model together, counted in padded tokens: as many as fit, cut where that costs least.

A pass costs its rows times its longest row, and something beside that, since the weights are read once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Padded tokens whose work a further pass costs beside its own. In training: 50 to 100 on a CPU core for 0.4 to 30
# million parameters, some 300 on a GPU, which reads the weights for longer than it computes with fewer.
PASS = 128
FORWARD = 32  # of a pass without a backward one

_PASSES = 1 << 20  # more than there are


def cut(lengths: Sequence[int], most: int, beside: int = PASS) -> list[list[int]]:
    """Return rows as indices in ascending order, pass by pass, that of the longest first; `lengths` are in tokens.

    Of all ways to cut the rows, sorted by length, into passes of at most `most` padded tokens, or of one row, the one
    that costs least, with `beside` tokens for each pass; of equals, the one with the fewest passes.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    counts = np.arange(1, len(order) + 1, dtype=np.int64)
    # Of the first j rows: what they cost at least and in how many passes, as one number; and where the last one begins.
    best, begins = np.zeros(len(order) + 1, dtype=np.int64), [0] * (len(order) + 1)
    for j in range(1, len(order) + 1):
        width = lengths[order[j - 1]]
        first = max(0, j - max(1, most // max(width, 1)))
        tried = best[first:j] + (counts[: j - first][::-1] * width + beside) * _PASSES + 1
        begins[j] = first + int(tried.argmin())
        best[j] = tried[begins[j] - first]
    parts, j = list[list[int]](), len(order)
    while j:
        parts.append(sorted(order[begins[j] : j]))
        j = begins[j]
    return parts

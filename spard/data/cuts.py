"""Divides rows into passes through a model that minimize padding within a token budget.

The cost of a pass is its number of rows times its longest row, plus a constant for reading the weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Overhead of a pass, in padded tokens. Measured in training: 50 to 100 on a CPU core for 0.4 to 30 million parameters,
# and about 300 on a GPU, where reading the weights dominates small passes.
PASS = 128
FORWARD = 32  # overhead of a pass without gradients

_PASSES = 1 << 20  # more than any number of passes


def cut(lengths: Sequence[int], most: int, beside: int = PASS) -> list[list[int]]:
    """Return the passes as lists of row indices (ascending), the pass with the longest row first.

    `lengths` are tokens per row. A pass has at most `most` padded tokens, or one row. Of all ways to cut the rows,
    sorted by length, into passes, the cheapest is chosen (dynamic programming), with `beside` tokens of overhead per
    pass; ties go to fewer passes.

        cut([3, 9, 3, 8], most=20)  # [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    counts = np.arange(1, len(order) + 1, dtype=np.int64)
    # For the first j rows: least cost and number of passes, packed into one number, and where the last pass begins.
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

"""Which rows of a step go through the model together, counted in padded tokens.

A pass costs its rows times its longest row, and `PASS` beside it. The rows of a micro-batch and what rides with them,
prompts of the anchor and safe rows among the training rows, are cut, sorted by length, into the passes that cost least:
so a long prompt of the pool does not pad a whole batch, nor a customer's long row the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spard.data.batches import PASS

LEAST = 1024  # padded tokens that a pass may have however small the customer's rows are


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass through the model: training rows and pairs of the anchor, by number."""

    rows: list[int]
    anchors: list[int]


def planned(
    rows: Sequence[int],
    customer_rows: int,
    anchors: Sequence[int],
    row_len: Sequence[int],
    prompt_len: Sequence[int],
    most: int | None = None,
) -> list[Pass]:
    """Return the passes of a micro-batch, that of the longest first, each with its numbers in their order.

    Rows from number `customer_rows` on are safe ones. `row_len` and `prompt_len` are the tokens of all rows and of all
    pairs' prompts. A pass has `most` padded tokens unless it is one row; None: as the customer's rows in one piece have
    with as many more beside them as ride.
    """
    lengths = [*(row_len[row] for row in rows), *(prompt_len[pair] for pair in anchors)]
    if most is None:
        most = max(LEAST, len(lengths) * max((row_len[row] for row in rows if row < customer_rows), default=0))
    return [
        Pass([rows[i] for i in part if i < len(rows)], [anchors[i - len(rows)] for i in part if i >= len(rows)])
        for part in cut(lengths, most)
    ]


def cut(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return rows as indices in ascending order, pass by pass, that of the longest first; `lengths` are in tokens.

    Of all ways to cut the rows, sorted by length, into passes of at most `most` padded tokens, or of one row, the one
    that costs least; of equals, the one with the fewest passes.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best: list[tuple[float, int, int]] = [
        (0, 0, 0)
    ]  # of the first j rows: what they cost, passes, where the last begins
    for j in range(1, len(order) + 1):
        width, found = lengths[order[j - 1]], (math.inf, 0, 0)
        for i in range(j - 1, -1, -1):
            tokens = (j - i) * width
            if tokens > most and j - i > 1:
                break
            cost, passes, _ = best[i]
            found = min(found, (cost + tokens + PASS, passes + 1, i))
        best.append(found)
    parts, j = list[list[int]](), len(order)
    while j:
        i = best[j][2]
        parts.append(sorted(order[i:j]))
        j = i
    return parts

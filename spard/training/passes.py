"""Which rows of a step go through the model together, counted in padded tokens.

A pass costs its rows times its longest row, and `PASS` beside it. The rows of a micro-batch, with the safe rows among
them, are cut, sorted by length, into the passes that cost least: so a long row of the pool does not pad a whole batch,
nor a customer's long row the short ones. Prompts of the anchor go through in passes of their own, since the length of
their gradient is bounded by that of the rows' (`spard.losses.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spard.data.batches import PASS

LEAST = 1024  # padded tokens that a pass may have however small the customer's rows are


def planned(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the rows of each pass in their order, the pass of the longest first.

    `lengths` are the tokens of all rows; a pass has `most` padded tokens at most unless it is one row.
    """
    return [[numbers[i] for i in part] for part in cut([lengths[row] for row in numbers], most)]


def at_most(rows: Sequence[int], customer_rows: int, row_len: Sequence[int]) -> int:
    """Return the padded tokens of a micro-batch in one piece whose rows are all as long as the customer's longest.

    Rows from number `customer_rows` on are safe ones.
    """
    return max(LEAST, len(rows) * max((row_len[row] for row in rows if row < customer_rows), default=0))


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

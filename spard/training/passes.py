"""Which rows of a step go through the model together, counted in padded tokens.

The rows of a micro-batch, with the safe rows among them, are cut, sorted by length, into the passes that cost least
(`spard.data.cuts`): so a long row of the pool does not pad a whole batch, nor a customer's long row the short ones.
Prompts of the anchor go through in passes of their own, since the length of their gradient is bounded by that of the
rows' (`spard.losses.gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.data.cuts import PASS, cut

LEAST = 1024  # padded tokens that a pass may have however small the customer's rows are


def plan_passes(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the rows of each pass in their order, the pass of the longest first.

    `lengths` are the tokens of all rows; a pass has `most` padded tokens at most unless it is one row.
    """
    return [[numbers[i] for i in part] for part in cut([lengths[row] for row in numbers], most, PASS)]


def at_most(rows: Sequence[int], customer_rows: int, row_len: Sequence[int]) -> int:
    """Return the padded tokens of a micro-batch in one piece whose rows are all as long as the customer's longest.

    Rows from number `customer_rows` on are safe ones.
    """
    return max(LEAST, len(rows) * max((row_len[row] for row in rows if row < customer_rows), default=0))

"""The rows of a step that go through the model together, limited by padded tokens.

The rows of a micro-batch are sorted by length and cut into the passes of lowest cost (`spard.data.cuts`): then a long
row of the pool does not pad a whole batch, nor a customer's long row the short ones. Prompts of the anchor have
passes of their own, since the length of their gradient is bounded by the length of the task gradient
(`spard.losses.gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.data.cuts import PASS, cut

LEAST = 1024  # padded tokens allowed in a pass even if the customer's rows are short


def plan_passes(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the row numbers of each pass, the pass with the longest rows first.

    `lengths` are the tokens of all rows by number. A pass has at most `most` padded tokens, unless it is a single row.
    """
    return [[numbers[i] for i in part] for part in cut([lengths[row] for row in numbers], most, PASS)]


def at_most(rows: Sequence[int], customer_rows: int, row_len: Sequence[int]) -> int:
    """Return the padded tokens of one pass over `rows` if each were as long as the customer's longest row.

    Rows from number `customer_rows` on are safe rows, whose length does not count. The result is at least `LEAST`.
    """
    return max(LEAST, len(rows) * max((row_len[row] for row in rows if row < customer_rows), default=0))

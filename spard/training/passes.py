"""Which rows of a step go through the model together, counted in padded tokens.

A pass costs its rows times its longest row, and `PASS` beside it. The customer's rows of a micro-batch go together;
what rides with them, prompts of the anchor and safe rows among the training rows, stays where that costs no more than
passes of its own. So a long prompt of the pool does not pad a whole batch, and a short one is not padded to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Padded tokens whose work a further pass costs beside its own: 50 to 100 on a CPU core for 0.4 to 30 million
# parameters, some 300 on a GPU, which reads the weights for longer than it computes with fewer.
PASS = 128
LEAST = 1024  # padded tokens that a pass may have however small the customer's is


_Cut = tuple[float, list[tuple[int, int]]]  # what it costs, and the passes as ranges


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass through the model: training rows and pairs of the anchor, by number."""

    rows: list[int]
    anchors: list[int]


def planned(
    rows: Sequence[int], customer_rows: int, anchors: Sequence[int], row_len: Sequence[int], prompt_len: Sequence[int]
) -> list[Pass]:
    """Return the passes of a micro-batch, that of the customer's rows first, each with its numbers in their order.

    Rows from number `customer_rows` on are safe ones. `row_len` and `prompt_len` are the tokens of all rows and of all
    pairs' prompts.
    """
    riders = [row for row in rows if row >= customer_rows]
    lengths = [*(row_len[row] for row in riders), *(prompt_len[pair] for pair in anchors)]
    aside = leaving([row_len[row] for row in rows if row < customer_rows], lengths)
    gone = {riders[i] for part in aside for i in part if i < len(riders)}
    left = {i - len(riders) for part in aside for i in part if i >= len(riders)}
    first = Pass([row for row in rows if row not in gone], [pair for i, pair in enumerate(anchors) if i not in left])
    others = [
        Pass([riders[i] for i in part if i < len(riders)], [anchors[i - len(riders)] for i in part if i >= len(riders)])
        for part in map(sorted, aside)
    ]
    return [each for each in (first, *others) if each.rows or each.anchors]


def leaving(own: Sequence[int], riders: Sequence[int]) -> list[list[int]]:
    """Return which riders do not ride, pass by pass, as indices; `own` and `riders` are lengths in tokens.

    Of all ways to cut the riders, sorted by length, into passes and a part that rides, the one that costs least; of
    equals, the one in which most ride. A pass is as large as that of the customer's rows or `LEAST` at most, unless
    one rider alone is larger.
    """
    order = sorted(range(len(riders)), key=lambda i: riders[i])
    length, n, width = [riders[i] for i in order], len(riders), max(own, default=0)
    most = max(len(own) * width, LEAST)

    def alone(i: int, j: int) -> float:
        tokens = (j - i) * length[j - 1]
        return tokens + PASS if j - i == 1 or tokens <= most else math.inf

    def riding(i: int, j: int) -> int:
        return (len(own) + j - i) * max(width, length[j - 1] if j > i else 0)

    shorter: dict[int, _Cut] = {0: (0, [])}  # by j: the first j do not ride
    for j in range(1, n + 1):
        shorter[j] = min((shorter[i][0] + alone(i, j), [*shorter[i][1], (i, j)]) for i in range(j))
    longer: dict[int, _Cut] = {n: (0, [])}  # by i: those from i on do not ride
    for i in reversed(range(n)):
        longer[i] = min((alone(i, j) + longer[j][0], [(i, j), *longer[j][1]]) for j in range(i + 1, n + 1))
    ways = ((shorter[i][0] + riding(i, j) + longer[j][0], i - j, i, j) for i in range(n + 1) for j in range(i, n + 1))
    _, _, i, j = min(ways)
    return [[order[k] for k in range(a, b)] for a, b in (*shorter[i][1], *longer[j][1])]

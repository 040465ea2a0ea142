"""Makes batches of encoded rows and decides their order; `spard.data.chat` does the encoding.

Outside of training, rows are divided into passes that minimize padding within a token budget (`cut`). The cost of a
pass is its number of rows times its longest row, plus a constant for reading the weights once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spard.data.chat import (
    NO_LOSS,
    PLAIN_TEMPLATE,
    EncodedSample,
    encode,
    encode_all,
    encode_to_train,
    render_prompt,
    render_question,
    set_plain_template,
)
from spard.data.control_tokens import end_tokens
from spard.data.rows import Example, Message, Prompt, prompt_text, read_examples, read_pool, read_prompts

__all__ = [
    "NO_LOSS",
    "PLAIN_TEMPLATE",
    "Batch",
    "EncodedSample",
    "Example",
    "Message",
    "Prompt",
    "batches",
    "collate",
    "encode",
    "encode_all",
    "encode_to_train",
    "end_tokens",
    "order",
    "prompt_text",
    "read_examples",
    "read_pool",
    "read_prompts",
    "render_prompt",
    "render_question",
    "set_plain_template",
    "to_device",
]


class Batch(NamedTuple):
    """B rows padded on the right to length T, and their S labeled tokens, row by row; a row's first token has no label.

    at_S     index, in the flattened [B, T] tokens, of the token before the labeled one, whose state predicts it
    label_S  the labeled token id
    place_S  1 for the first labeled token of its row, 2 for the next, and so on
    lengths  number of tokens of each row
    labels   number of labeled tokens of each row
    rows     indices of the rows among the safe rows, for a safe batch
    """

    ids_BT: Tensor
    at_S: Tensor
    label_S: Tensor
    place_S: Tensor
    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    rows: tuple[int, ...] = ()

    def on_grid(self, values_S: Tensor) -> Tensor:
        """Return values of the labeled tokens as a `[B, T - 1]` tensor, 0 elsewhere."""
        grid_N = values_S.new_zeros(self.ids_BT.numel()).index_copy(0, self.at_S, values_S)
        return grid_N.view_as(self.ids_BT)[:, :-1]


def collate(batch: Sequence[EncodedSample], pad_id: int, device: torch.device | str) -> Batch:
    """Pad rows to the longest one, on the right, and locate the labels.

    Labels are located here, on the host, because finding them on the GPU forces the host to wait for it.
    """
    lengths = tuple(len(row.ids) for row in batch)
    width = max(lengths)
    ids = [[*row.ids, *[pad_id] * (width - len(row.ids))] for row in batch]
    labeled = [[i for i, label in enumerate(row.labels[1:]) if label != NO_LOSS] for row in batch]
    at = [number * width + i for number, found in enumerate(labeled) for i in found]
    label = [row.labels[i + 1] for row, found in zip(batch, labeled, strict=True) for i in found]
    place = [place for found in labeled for place in range(1, len(found) + 1)]
    at_S, label_S, place_S = to_device([at, label, place], device)
    return Batch(to_device(ids, device), at_S, label_S, place_S, lengths, tuple(map(len, labeled)))


def to_device(values: Tensor | Sequence[Any], device: torch.device | str) -> Tensor:
    """Return a tensor, or integers as a tensor, on a device; copies to a GPU are asynchronous."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def order(seed: int, epoch: int, n: int, stream: int = 0) -> list[int]:
    """Return a permutation of range(n) that depends only on (seed, epoch, stream); no global generator is used."""
    permutation: list[int] = _generator(seed, epoch, stream).permutation(n).tolist()
    return permutation


def batches(
    seed: int, epoch: int, lengths: Sequence[int], size: int, group: int = 4, *, shuffle: bool = True
) -> list[list[int]]:
    """Return one epoch as batches of row indices; every `group` batches of shuffled rows are sorted by length.

    `lengths` are tokens per row, `size` the rows per batch; the last batch may be smaller. Sorting saves padding; a
    small group keeps batches nearly random. Without `shuffle` the rows come in their own order.
    """
    if not shuffle:
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    shuffled = order(seed, epoch, len(lengths))
    grouped: list[int] = []
    for start in range(0, len(shuffled), size * group):
        grouped += sorted(shuffled[start : start + size * group], key=lambda row: lengths[row])
    cut = [grouped[start : start + size] for start in range(0, len(grouped), size)]
    # Sorting has put the long batches of each group last, so the batches are shuffled again.
    return [cut[i] for i in order(seed, epoch, len(cut), stream=1)]


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    # Philox is counter-based: its streams for different keys are independent, so no state needs to be saved for a
    # resume.
    return np.random.Generator(np.random.Philox(key=[seed, (stream << 32) + epoch]))


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

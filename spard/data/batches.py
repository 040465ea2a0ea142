"""Examples become batches here, and get their order; how they become tokens is `spard.data.chat`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spard.data.chat import (
    NO_LOSS,
    PLAIN_TEMPLATE,
    Encoded,
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
    "PASS",
    "PLAIN_TEMPLATE",
    "Batch",
    "Encoded",
    "Example",
    "Message",
    "Prompt",
    "batches",
    "by_length",
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
]


# Padded tokens whose work a further pass costs beside its own: 50 to 100 on a CPU core for 0.4 to 30 million
# parameters, some 300 on a GPU, which reads the weights for longer than it computes with fewer.
PASS = 128


class Batch(NamedTuple):
    """Rows padded on the right to one length; `rows` are their places among the safe rows, if they are such."""

    ids_BT: Tensor
    mask_BT: Tensor
    labels_BT: Tensor
    rows: tuple[int, ...] = ()


def collate(batch: Sequence[Encoded], pad_id: int, device: torch.device | str) -> Batch:
    """Pad to the longest row, on the right."""
    width = max(len(row.ids) for row in batch)
    ids = [[*row.ids, *[pad_id] * (width - len(row.ids))] for row in batch]
    mask = [[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in batch]
    labels = [[*row.labels, *[NO_LOSS] * (width - len(row.labels))] for row in batch]
    ids_BT, mask_BT, labels_BT = (torch.tensor(rows).to(device, non_blocking=True) for rows in (ids, mask, labels))
    return Batch(ids_BT, mask_BT, labels_BT)


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return the indices of rows, longest first, in batches of at most `batch_tokens` padded tokens.

    A batch ends earlier where padding its next row would waste more than a further pass through the model costs.
    """
    cut: list[list[int]] = []
    wasted = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = lengths[cut[-1][0]] if cut else 0
        wasted += width - lengths[i]
        if not cut or width * (len(cut[-1]) + 1) > batch_tokens or wasted > PASS:
            cut.append([])
            wasted = 0
        cut[-1].append(i)
    return cut


def order(seed: int, epoch: int, n: int, stream: int = 0) -> list[int]:
    """Return a permutation of n that depends only on (seed, epoch, stream); no global generator is touched."""
    permutation: list[int] = _generator(seed, epoch, stream).permutation(n).tolist()
    return permutation


def batches(seed: int, epoch: int, lengths: Sequence[int], size: int, group: int = 4) -> list[list[int]]:
    """One epoch as batches of similar length: of every `group` batches of the shuffled rows, neighbors in length.

    The last batch of the epoch may be smaller. Grouping saves padding; a small group keeps batches nearly random.
    """
    shuffled = order(seed, epoch, len(lengths))
    grouped: list[int] = []
    for start in range(0, len(shuffled), size * group):
        grouped += sorted(shuffled[start : start + size * group], key=lambda row: lengths[row])
    cut = [grouped[start : start + size] for start in range(0, len(grouped), size)]
    return [cut[i] for i in order(seed, epoch, len(cut), stream=1)]


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, (stream << 32) + epoch]))

"""Compute batch sizes outside of training, in tokens, from a model's shape and the free memory of its GPU.

Embeddings, evaluations and the row signal use passes of `pass_tokens` padded tokens; generation uses batches of
`generated_rows` prompts. The provider may fix the number for all of them (`set_tokens`). Training is planned before its
first step instead (`spard.models.memory`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from spard import distributed
from spard.data.batches import FORWARD, cut
from spard.errors import is_gpu_out_of_memory
from spard.models.shapes import Shape, read_model_shape
from spard.models.sharding import is_sharded

Found = TypeVar("Found")
Tell = Callable[[int, int], None]
"""Takes how much of a work is done and how much there is; called at its beginning and after each part."""
Report = Callable[[str, int, int], None]
"""Takes what is done, as a phrase, and the same two numbers."""

ON_CPU = 2048  # padded tokens per pass: a layer's activations fit in a core's cache, and more gain nothing
ON_CPU_KEPT = 2**17  # maximum tokens in the key-value cache on a CPU
ON_CPU_BYTES = 2**28  # and its maximum bytes in float32, where 135 million weights need 46 kB per token
UNKNOWN = 8192  # tokens per pass on a GPU for an unknown architecture
MOST = 2**16  # maximum tokens per pass on a GPU, which is saturated by far fewer

_SHARE = 0.8  # usable share of free memory, because the allocator fragments
_CONTEXT = 3 << 29  # maximum bytes of CUDA, its libraries and buffers in each process
_SINGLE = 4  # bytes of a number in float32
_LOGITS = 2**27 * 3 * _SINGLE  # float32 logits held at once (`spard.losses.cross_entropy`), and their logarithms


def name_work(report: Report | None, doing: str) -> Tell | None:
    """Return the callback that reports the progress of a work under this phrase; None if nobody is told."""
    return partial(report, doing) if report else None


@dataclass(slots=True)
class _TokenLimits:
    """Two limits in padded tokens: the provider's, and the limit found when GPU memory ran out."""

    told: int | None = None
    learned: int | None = None


_held = _TokenLimits()


def set_tokens(most: int | None) -> None:
    """Fix the number of padded tokens per pass for all models of this process; None: compute the number."""
    _held.told, _held.learned = most, None


def told_tokens() -> int | None:
    """Return the provider's number of padded tokens per pass, or None."""
    return _held.told


def pass_tokens(model: Any) -> int:
    """Return the largest number of padded tokens for one forward pass without gradients."""
    if _held.told is not None:
        asked = _held.told
    elif model.device.type != "cuda":
        asked = ON_CPU
    else:
        shape = read_model_shape(model.config.to_dict())
        asked = UNKNOWN if shape is None else most_tokens(shape, free_bytes(model.device), model.dtype.itemsize)
    return min(asked, _held.learned or asked)


def generated_rows(model: Any, prompt_tokens: int, new_tokens: int) -> int:
    """Return the batch size for generating replies of `new_tokens` tokens to prompts of at most `prompt_tokens`."""
    tokens, shape = prompt_tokens + new_tokens, read_model_shape(model.config.to_dict())
    if _held.told is not None:
        rows = _held.told // tokens
    elif model.device.type != "cuda":
        rows = generated_tokens(model) // tokens
    elif shape is None:
        rows = UNKNOWN // tokens
    else:
        rows = most_rows(shape, free_bytes(model.device), prompt_tokens, new_tokens, model.dtype.itemsize)
    return max(1, rows)


def generated_tokens(model: Any) -> int:
    """Return the largest number of padded tokens in the key-value cache of a model on a CPU."""
    if _held.told is not None:
        return _held.told
    shape = read_model_shape(model.config.to_dict())
    # As many in bfloat16, in half of the memory: more rows at once are no faster there.
    return min(ON_CPU_KEPT, ON_CPU_BYTES // kept_bytes(shape, _SINGLE)) if shape else UNKNOWN


def most_tokens(shape: Shape, free: int, number: int) -> int:
    """Return the padded tokens of a pass that fits in `free` bytes; `number` is the size of a weight in bytes."""
    return max(1, min(MOST, (int(free * _SHARE) - _LOGITS) // passed_bytes(shape, number)))


def most_rows(shape: Shape, free: int, prompt_tokens: int, new_tokens: int, number: int) -> int:
    """Return the rows whose keys, values, prompt activations and next logits fit in `free` bytes.

    The keys and values of one layer are counted twice, because they are copied when they grow.
    """
    kept = (prompt_tokens + new_tokens) * kept_bytes(shape, number) * (shape.layers + 1) // shape.layers
    each = kept + prompt_tokens * passed_bytes(shape, number) + 3 * _SINGLE * shape.vocab
    return max(1, int(free * _SHARE) // each)


def passed_bytes(shape: Shape, number: int) -> int:
    """Return the bytes per token of a forward pass: the hidden states, and the widest part of a layer.

    The states are counted with their float32 norm; the widest part is the MLP, or queries, keys, values and their
    output.
    """
    states = shape.hidden * (2 * number + 2 * _SINGLE)
    return states + number * max(3 * shape.inner, 3 * shape.queries + 4 * shape.keys)


def kept_bytes(shape: Shape, number: int) -> int:
    """Return the bytes per token of the keys and values of all layers."""
    return 2 * shape.layers * shape.keys * number


def in_step(model: Any, tokens: int) -> int:
    """Return the number of tokens per pass; for a sharded model the minimum over all ranks."""
    return min(distributed.gather_objects(tokens)) if is_sharded(model) else tokens


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, including memory that this process's allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def own_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that are free or used by this process; capped at its total memory."""
    free, total = torch.cuda.mem_get_info(device)
    return min(total, int(free + torch.cuda.memory_reserved(device) + _CONTEXT))


def in_passes(
    model: Any,
    lengths: Sequence[int],
    run: Callable[[list[int]], Found],
    most: int | None = None,
    among: Sequence[int] | None = None,
    tell: Tell | None = None,
) -> Iterator[tuple[list[int], Found]]:
    """Yield for each pass, longest rows first, the positions of its rows and the result of `run` on them.

    `lengths` are the tokens per row. A pass has at most `most` padded tokens (default: as many as fit), and only rows
    at the positions `among`, if given. `tell` gets the rows done and in all. If GPU memory runs out, the limit is
    halved for the rest of the process, down to one row; sharded models raise instead, because their ranks must make the
    same passes.

        for places, losses in in_passes(model, [len(row.ids) for row in rows], lambda places: loss_of(places)): ...
    """
    limit = in_step(model, pass_tokens(model)) if most is None else min(most, _held.learned or most)
    # Longest rows first: if memory runs out it does so at the first pass, and not after most of the work.
    rows = range(len(lengths)) if among is None else among
    left, done = _cut(lengths, rows, limit), 0
    if tell and left:
        tell(done, len(rows))
    while left:
        places = left.popleft()
        found, error = _try_pass(run, places)
        if error is None:
            done += len(places)
            if tell:
                tell(done, len(rows))
            yield places, found[0]
        elif len(places) == 1 or is_sharded(model):
            raise error
        else:
            torch.cuda.empty_cache()
            _held.learned = len(places) * max(lengths[i] for i in places) // 2
            left = _cut(lengths, [i for part in (places, *left) for i in part], _held.learned)


def _cut(lengths: Sequence[int], places: Sequence[int], most: int) -> deque[list[int]]:
    parts = cut([lengths[i] for i in places], most, FORWARD)
    return deque([places[i] for i in part] for part in parts)


def _try_pass(run: Callable[[list[int]], Found], places: list[int]) -> tuple[list[Found], RuntimeError | None]:
    """Return the result of a pass, or the error if memory ran out."""
    try:
        return [run(places)], None
    except RuntimeError as error:
        if not is_gpu_out_of_memory(error):
            raise
        # The traceback refers to the frames of the failed pass, whose tensors must be freed before the next try.
        return [], error.with_traceback(None)

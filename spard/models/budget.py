"""How much goes through a model at once where nothing is learned: from its shape and from what its GPU has free.

Embeddings, losses that are only measured and the row signal take passes of `pass_tokens` padded tokens; replies are
written to `generated_rows` prompts at once. The provider may set another number for all of them (`set_tokens`). What
training takes is planned before its first step (`spard.models.fit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from spard import distributed
from spard.data.cuts import FORWARD, cut
from spard.errors import is_gpu_out_of_memory
from spard.models.shapes import Shape, read_model_shape
from spard.models.sharding import is_sharded

Found = TypeVar("Found")

ON_CPU = 2048  # padded tokens of a pass: what they make of a layer stays in a core's caches, and more win nothing
ON_CPU_KEPT = 2**17  # tokens whose keys and values are kept while replies are written on a CPU, of these
ON_CPU_BYTES = 2**30  # bytes at most: a model of 135 million weights keeps 46 kB of a token in float32
UNKNOWN = 8192  # of a pass on a GPU, for a model of a shape that is not known
MOST = 2**16  # of a pass on a GPU, which is busy long before

_SHARE = 0.8  # of free memory that tensors may take: an allocator cannot give out all of it
_CONTEXT = 3 << 29  # bytes of CUDA, its libraries and their buffers at most, in each process
_SINGLE = 4  # bytes of a number in float32
_LOGITS = 2**27 * 3 * _SINGLE  # those held at once (`spard.losses.cross_entropy`), in float32, and their logarithms


@dataclass(slots=True)
class _Held:
    """What this process was told, and what it has learned: more tokens were too many for its GPU."""

    told: int | None = None
    learned: int | None = None


_held = _Held()


def set_tokens(most: int | None) -> None:
    """Take the provider's number of padded tokens, for all models of this process; None: it is worked out."""
    _held.told, _held.learned = most, None


def told_tokens() -> int | None:
    """Return the provider's number."""
    return _held.told


def pass_tokens(model: Any) -> int:
    """Return how many padded tokens one forward pass may hold that keeps nothing for a backward one."""
    if _held.told is not None:
        asked = _held.told
    elif model.device.type != "cuda":
        asked = ON_CPU
    else:
        shape = read_model_shape(model.config.to_dict())
        asked = UNKNOWN if shape is None else most_tokens(shape, free_bytes(model.device), model.dtype.itemsize)
    return min(asked, _held.learned or asked)


def generated_rows(model: Any, prompt_tokens: int, new_tokens: int) -> int:
    """Return to how many prompts of at most `prompt_tokens` replies may be written at once, each of `new_tokens`."""
    tokens, shape = prompt_tokens + new_tokens, read_model_shape(model.config.to_dict())
    if _held.told is not None:
        rows = _held.told // tokens
    elif model.device.type != "cuda":
        rows = (
            min(ON_CPU_KEPT, ON_CPU_BYTES // kept_bytes(shape, model.dtype.itemsize)) if shape else UNKNOWN
        ) // tokens
    elif shape is None:
        rows = UNKNOWN // tokens
    else:
        rows = most_rows(shape, free_bytes(model.device), prompt_tokens, new_tokens, model.dtype.itemsize)
    return max(1, rows)


def most_tokens(shape: Shape, free: int, number: int) -> int:
    """Return the padded tokens whose pass takes no more than a share of `free` bytes; `number` is that of a weight."""
    return max(1, min(MOST, (int(free * _SHARE) - _LOGITS) // passed_bytes(shape, number)))


def most_rows(shape: Shape, free: int, prompt_tokens: int, new_tokens: int, number: int) -> int:
    """Return the rows whose keys and values, prompts at work and next logits take no more than a share of `free`.

    Of one layer keys and values are held twice while they grow by a token.
    """
    kept = (prompt_tokens + new_tokens) * kept_bytes(shape, number) * (shape.layers + 1) // shape.layers
    each = kept + prompt_tokens * passed_bytes(shape, number) + 3 * _SINGLE * shape.vocab
    return max(1, int(free * _SHARE) // each)


def passed_bytes(shape: Shape, number: int) -> int:
    """Return the bytes that a token takes at work in a forward pass: the states, and the widest part of a layer.

    States stand beside their norm, in float32 too; then all of the MLP, or queries, keys, values and what they give.
    """
    states = shape.hidden * (2 * number + 2 * _SINGLE)
    return states + number * max(3 * shape.inner, 3 * shape.queries + 4 * shape.keys)


def kept_bytes(shape: Shape, number: int) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return 2 * shape.layers * shape.keys * number


def in_step(model: Any, tokens: int) -> int:
    """Return how many tokens go through the model at once: of a sharded one no more than any rank has memory for."""
    return min(distributed.gather_objects(tokens)) if is_sharded(model) else tokens


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are free, or held by this process's allocator without use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def own_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that are free or this process's own: all of it, if nobody else is on it."""
    free, total = torch.cuda.mem_get_info(device)
    return min(total, int(free + torch.cuda.memory_reserved(device) + _CONTEXT))


def in_passes(
    model: Any,
    lengths: Sequence[int],
    run: Callable[[list[int]], Found],
    most: int | None = None,
    among: Sequence[int] | None = None,
) -> Iterator[tuple[list[int], Found]]:
    """Yield the places of the rows of each pass, the longest first, and what `run` makes of them.

    A pass has `most` padded tokens at most, by default as many as fit, and only rows at the places `among`, where these
    are given. Where a GPU's memory is too little all the same it is half as many from then on, down to one row; not for
    a sharded model, whose ranks have to keep in step.
    """
    limit = in_step(model, pass_tokens(model)) if most is None else min(most, _held.learned or most)
    left = _cut(lengths, range(len(lengths)) if among is None else among, limit)
    while left:
        places = left.popleft()
        found, error = _try_pass(run, places)
        if error is None:
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
    """Return what a pass gives, or that memory was too little; its tensors are gone then."""
    try:
        return [run(places)], None
    except RuntimeError as error:
        if not is_gpu_out_of_memory(error):
            raise
        return [], error.with_traceback(None)

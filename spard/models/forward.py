"""Forward passes over rows padded on the right: causal attention needs no mask there, and no rows are packed.

Rows of a file mostly begin alike, with the chat template's first tokens and the customer's system prompt. On a CPU
these tokens go through the model once per pass instead of once per row; states and gradients are the same apart from
rounding. `benchmarks/shared_tokens.py` and `python -m benchmarks.training --system 100` measure what that saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, masking_utils

from spard.models.decoding import changes_angles, counts_columns, is_plain
from spard.models.sharding import is_sharded

# Saved tokens times the hidden size from which a second, smaller call of the model pays off. On a CPU core it broke
# even between 72 and 168 saved tokens at a hidden size of 96, near 40 at 256, below 36 at 640
# (`python -m benchmarks.shared_tokens`).
LEAST_SAVED = 20_000

_LOOKS_FOR_PACKED = "find_packed_sequence_indices"
_looks = getattr(masking_utils, _LOOKS_FOR_PACKED, None)


def final_states(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the final hidden states `[B, T, D]` of token ids `[B, T]`."""
    decoder, shared = model.get_decoder(), _shared_tokens(model, ids_BT)
    with ignore_packing():
        if shared:
            cache = DynamicCache(config=model.config)
            first_1PD = decoder(input_ids=ids_BT[:1, :shared], past_key_values=cache, use_cache=True).last_hidden_state
            # A model that keeps its states elsewhere would compute the rest as if nothing came before it.
            if cache.get_seq_length() == shared:
                cache.batch_repeat_interleave(len(ids_BT))
                rest = decoder(input_ids=ids_BT[:, shared:], past_key_values=cache, use_cache=True)
                return torch.cat([first_1PD.expand(len(ids_BT), -1, -1), rest.last_hidden_state], dim=1)
        states_BTD: Tensor = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
    return states_BTD


def _shared_tokens(model: Any, ids_BT: Tensor) -> int:
    """Return how many first tokens the rows share if computing them once pays off, otherwise 0.

    Only on a CPU: a GPU would have to wait for the comparison, and its attention kernels want equally long queries and
    keys. Ranks of a sharded model must make the same passes, and gradient checkpointing works without a cache.
    """
    if ids_BT.device.type != "cpu" or len(ids_BT) < 2:
        return 0
    differs_T = (ids_BT != ids_BT[:1]).any(dim=0)
    shared = min(int(differs_T.int().argmax()) if differs_T.any() else len(differs_T), len(differs_T) - 1)
    saved = shared * (len(ids_BT) - 1)
    if saved * model.config.get_text_config().hidden_size < LEAST_SAVED or not is_plain(model):
        return 0
    if counts_columns(model) or changes_angles(model, ids_BT.shape[1]) or is_sharded(model):
        return 0
    is_checkpointing = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    return 0 if is_checkpointing else shared


@contextmanager
def ignore_packing() -> Iterator[None]:
    """Disable transformers' search for packed sequences inside the block.

    Without a mask transformers inspects the position ids at every pass, which forces the host to wait for the device.
    """
    if _looks is None:  # a version of transformers without this search
        yield
        return
    # transformers has no option for this; its module-level function is replaced for the duration of the block.
    setattr(masking_utils, _LOOKS_FOR_PACKED, _none_packed)
    try:
        yield
    finally:
        setattr(masking_utils, _LOOKS_FOR_PACKED, _looks)


def _none_packed(position_ids: Tensor) -> None:
    return None

"""Forward passes over rows padded on the right: causal attention needs no mask there, and no rows are packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

_LOOKS_FOR_PACKED = "find_packed_sequence_indices"
_looks = getattr(masking_utils, _LOOKS_FOR_PACKED, None)


def final_states(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the final hidden states `[B, T, D]` of token ids `[B, T]`."""
    with ignore_packing():
        states_BTD: Tensor = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    return states_BTD


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

"""Forward passes over rows that are padded on the right: causal attention needs no mask then, and nothing is packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

_LOOKS_FOR_PACKED = "find_packed_sequence_indices"
_looks = getattr(masking_utils, _LOOKS_FOR_PACKED, None)


def final_states(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the final hidden states of all tokens, B x T x D."""
    with ignore_packing():
        states_BTD: Tensor = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    return states_BTD


@contextmanager
def ignore_packing() -> Iterator[None]:
    """Keep transformers from looking inside the block for rows that are packed one after the other.

    Without a mask it would read the positions at every pass, for which the host has to wait for the device.
    """
    if _looks is None:  # another version of transformers
        yield
        return
    setattr(masking_utils, _LOOKS_FOR_PACKED, _none_packed)
    try:
        yield
    finally:
        setattr(masking_utils, _LOOKS_FOR_PACKED, _looks)


def _none_packed(position_ids: Tensor) -> None:
    return None

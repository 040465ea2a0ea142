"""A base model in NF4 (Dettmers et al., "QLoRA", 2023): 4 bits per weight of its linear layers, by bitsandbytes.

Embeddings, norms and the head stay unquantized. bitsandbytes is imported only if NF4 is requested. Training and
inference compute the same.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig

from spard.config.quantization import Quantization
from spard.models.peft import see_bitsandbytes


def options(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return the `from_pretrained` arguments for NF4 with computation in `dtype`; {} for "none".

    Raises `ImportError` without bitsandbytes.
    """
    if quantization == "none":
        return {}
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"{quantization} needs bitsandbytes: pip install 'spard[nf4]'")
    see_bitsandbytes()
    config: Any = BitsAndBytesConfig  # its arguments are not typed
    asked = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization == "nf4_double",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": asked, "device_map": {"": device}}


def keep_layout_(model: Any) -> None:
    """Keep NF4 layers from repacking their weights.

    On CPUs with bfloat16 products bitsandbytes permanently rounds the scales of a layer to bfloat16 at its first
    inference, which makes the audited model differ from the trained one.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def require_whole_blocks(model: Any) -> None:
    """Raise `ValueError` for a layer whose input width is not a multiple of the NF4 block size.

    bitsandbytes 0.50.2 quantizes such a layer correctly but dequantizes it wrongly on a CPU: 37 % error instead of 9 %.
    """
    for name, part in model.named_parameters():
        state = getattr(part, "quant_state", None)
        if state is not None and state.shape[1] % state.blocksize:
            size = f"{state.shape[1]} inputs, and NF4 needs a multiple of {state.blocksize}"
            raise ValueError(f"{name.removesuffix('.weight')} has {size}")


def require_held(model: Any, quantization: Quantization) -> None:
    """Raise `ValueError` if NF4 was requested and no layer, or some layer wrongly, is quantized.

    Falcon, for example, has a linear class of its own, which transformers does not replace.
    """
    require_whole_blocks(model)
    if quantization != "none" and not quantized_bytes(model):
        kind = type(model).__name__
        raise ValueError(f"no layer of a {kind} can be held in NF4: offer it with the quantization never")


def quantized_bytes(model: Any) -> int:
    """Return the bytes of all NF4 weights with their scales."""
    return sum(_bytes(part) for part in model.parameters() if getattr(part, "quant_state", None) is not None)


def _bytes(part: Any) -> int:
    state = part.quant_state
    scales: list[Tensor] = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return sum(each.numel() * each.element_size() for each in (part, *scales))

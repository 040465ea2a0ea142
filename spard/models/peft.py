"""PEFT, imported without bitsandbytes, which PEFT imports wherever it is installed: that costs a second per start."""

from __future__ import annotations

import logging
import warnings

from spard.models.imports import unseen

# Warnings about other libraries that nobody here can fix: PEFT 0.21 reads an attribute that transformers 5.23 has
# renamed, and bitsandbytes looks on the hub for a kernel that is optional.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

with unseen("bitsandbytes"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_bnb_available(), is_bnb_4bit_available()  # both cache their result


def see_bitsandbytes() -> None:
    """Let PEFT use its own layers for NF4 weights from now on, as PEFT does for anyone who loads the adapter.

    Its ordinary layers also work on NF4 weights but round differently in 16 bits, and training must match serving.
    """
    is_bnb_available.cache_clear()
    is_bnb_4bit_available.cache_clear()


__all__ = [
    "BaseTunerLayer",
    "LoraConfig",
    "LoraLayer",
    "PeftModel",
    "get_peft_model",
    "get_peft_model_state_dict",
    "see_bitsandbytes",
    "set_peft_model_state_dict",
    "tuners_utils",
]

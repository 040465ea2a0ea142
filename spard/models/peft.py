"""PEFT, imported without bitsandbytes, which it would import wherever that is installed: a second for nothing."""

from __future__ import annotations

import logging
import warnings

from spard.models.unseen import unseen

# Of libraries about each other: PEFT 0.21 reads what transformers 5.23 has renamed, and bitsandbytes looks on the hub
# for a kernel that it does without. Nobody here can do anything about either.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

with unseen("bitsandbytes"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_bnb_available(), is_bnb_4bit_available()  # they remember what they find


def see_bitsandbytes() -> None:
    """Have PEFT put its own layers for NF4 over such weights from now on, as it does for whoever loads an adapter.

    Its usual layers work there too, and round otherwise in 16 bits: what was trained would not be what answers.
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

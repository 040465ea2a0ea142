"""PEFT, imported without bitsandbytes, which it would import wherever that is installed: a second for nothing.

LoRA layers over weights in NF4 are then PEFT's usual ones, which add to what such a layer makes of its input.
"""

from __future__ import annotations

from spard.models.unseen import unseen

with unseen("bitsandbytes"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_bnb_available(), is_bnb_4bit_available()  # they remember what they find

__all__ = [
    "BaseTunerLayer",
    "LoraConfig",
    "LoraLayer",
    "PeftModel",
    "get_peft_model",
    "get_peft_model_state_dict",
    "set_peft_model_state_dict",
    "tuners_utils",
]

"""PEFT, imported without bitsandbytes, which it would import wherever that is installed: a second for nothing.

LoRA layers over weights in NF4 are then PEFT's usual ones, which add to what such a layer makes of its input.
"""

from __future__ import annotations

import sys

_UNSEEN = "bitsandbytes"
_is_hidden = _UNSEEN not in sys.modules
if _is_hidden:
    sys.modules[_UNSEEN] = None  # type: ignore[assignment]  # as Python has it: not to be found
try:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_bnb_available(), is_bnb_4bit_available()  # they remember what they find
finally:
    if _is_hidden:
        del sys.modules[_UNSEEN]

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

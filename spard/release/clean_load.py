"""Loads an adapter as a customer does, with transformers and PEFT alone: `python -P spard/release/clean_load.py`.

It runs as a script in a process of its own and imports none of our code. Each line of its standard input is a JSON
request; the result goes to the request's folder `out`: `logits.safetensors` with `tuned.i` and `base.i` for each
conversation i, and then `seen.json`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

gc.disable()  # imports create no garbage, and collecting takes a fifth of their time
# PEFT, transformers and accelerate import these wherever they are installed, for NF4, object detection and SageMaker:
# one and a half seconds of CPU time. A module set to `None` in `sys.modules` counts as not installed.
_LEFT_OUT = [name for name in ("bitsandbytes", "boto3", "scipy", "sklearn") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_LEFT_OUT))  # type: ignore[arg-type]

import torch
from peft import PeftModel
from peft.import_utils import is_bnb_4bit_available, is_bnb_available
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

gc.enable()
gc.freeze()
for name in _LEFT_OUT:
    del sys.modules[name]

_STORED: dict[str, Callable[..., object]] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}  # formats to dequantize


class Request(TypedDict):
    """What to load, what to ask, and the folder for the answers."""

    base: str
    revision: str | None
    adapter: str
    is_lora: bool
    quantization: str
    dtype: str
    device: str
    conversations: list[list[dict[str, str]]]
    template_arguments: dict[str, object]
    max_new_tokens: int
    out: str


class Answer(TypedDict):
    """Whether a generated answer ended by itself, and its number of tokens."""

    ends: bool
    tokens: int


def main() -> None:
    """Serve one request per line of standard input, without keeping a model between two."""
    for line in sys.stdin:
        see(json.loads(line))
        gc.collect()


def see(ask: Request) -> None:
    """Write the logits of base model and adapter for each conversation; raise if one of them does not load."""
    tokenizer: Any = AutoTokenizer.from_pretrained(ask["adapter"])
    rows = [_ids(tokenizer, messages, ask["template_arguments"]) for messages in ask["conversations"]]
    settings = {"dtype": getattr(torch, ask["dtype"]), "use_safetensors": True}
    source = {"revision": ask["revision"], **settings, **_quantization_options(ask)}
    base: Any = AutoModelForCausalLM.from_pretrained(ask["base"], **source)
    for module in base.modules():  # else bitsandbytes rounds the scales on some CPUs
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if ask["quantization"] in _STORED:  # weights that were not quantized keep the dtype of the files
        base.to(settings["dtype"])
    model = base.to(ask["device"]).eval()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training: other attention kernels round differently
    found = {f"base.{i}": _logits(model, row) for i, row in enumerate(rows)}
    if ask["is_lora"]:
        model = PeftModel.from_pretrained(model, ask["adapter"], torch_device=ask["device"]).eval()
    else:
        del base, model
        tuned: Any = AutoModelForCausalLM.from_pretrained(ask["adapter"], **settings)
        model = tuned.to(ask["device"]).eval()
    found |= {f"tuned.{i}": _logits(model, row) for i, row in enumerate(rows)}
    out = Path(ask["out"])
    save_file(found, out / "logits.safetensors")
    seen = {"ids": rows, **_answer(model, tokenizer, rows[0], ask["max_new_tokens"])}
    # The parent polls for seen.json, so this file must appear last and complete.
    (out / "seen.part").write_text(json.dumps(seen))
    os.replace(out / "seen.part", out / "seen.json")


def _quantization_options(ask: Request) -> dict[str, object]:
    """Return the `from_pretrained` arguments for the base model's quantization, as in the model card."""
    if ask["quantization"] in _STORED:
        return {"quantization_config": _STORED[ask["quantization"]](dequantize=True)}
    if ask["quantization"] == "none":
        return {}
    for look in (is_bnb_available, is_bnb_4bit_available):
        look.cache_clear()  # PEFT looks again and uses its NF4 layers
    config: Any = BitsAndBytesConfig
    asked = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=ask["quantization"] == "nf4_double",
        bnb_4bit_compute_dtype=getattr(torch, ask["dtype"]),
    )
    return {"quantization_config": asked, "device_map": {"": ask["device"]}}


def _ids(tokenizer: Any, messages: list[dict[str, str]], arguments: Mapping[str, object]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def _logits(model: Any, row: list[int]) -> Tensor:
    ids_1T = torch.tensor([row], device=model.device)
    logits_TV: Tensor = model(input_ids=ids_1T).logits[0]
    return logits_TV.float().cpu().contiguous()


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, row: list[int], max_new_tokens: int) -> Answer:
    """Generate greedily; return the number of tokens, and whether the answer ended by itself."""
    ids_1T = torch.tensor([row], device=model.device)
    said = model.generate(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )[0, len(row) :].tolist()
    stated = model.generation_config.eos_token_id
    ends = set(stated) if isinstance(stated, list) else {stated}
    return {"ends": bool(said) and said[-1] in ends, "tokens": len(said)}


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: an adapter that takes another one's place (`hotswap=True`)
#
# Guess: `model.load_adapter(NEW, adapter_name=NAME, hotswap=True)` gives the logits of NEW, or refuses it, as PEFT's
# `hotswap_adapter` does.
# What happens: only the weights that NEW brings are put in the old ones' place. The scale stays that of the old
# adapter, so that another lora_alpha is not heard of; use_rslora and alpha_pattern, which PEFT refuses, are not looked
# at; and a module that NEW does not train keeps the old adapter's weights. Nothing is raised. `enable_peft_hotswap`,
# after which the swap is the default, changes nothing of it. Delete the old adapter and load the new one, or call
# PEFT's function.
#
# Seen on 2026-11-30, the largest difference of a logit, relative to the new adapter's largest effect; the old adapter
# has rank 8, lora_alpha 32 and trains q_proj and down_proj:
#   the same settings hotswap   0%  enabled   0%  deleted and loaded 0%  PEFT 0%
#   lora_alpha 8      hotswap 158%  enabled 158%  deleted and loaded 0%  PEFT 0%
#   q_proj alone      hotswap  83%  enabled  83%  deleted and loaded 0%  PEFT 0%
#   use_rslora        hotswap  98%  enabled  98%  deleted and loaded 0%  PEFT refused
#   alpha_pattern     hotswap  97%  enabled  97%  deleted and loaded 0%  PEFT refused
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
old = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def save(settings, folder):
    model = get_peft_model(load(), LoraConfig(**settings, init_lora_weights=False))
    model.save_pretrained(folder)
    return answer(model)


def swap_in_transformers(is_enabled):
    model = load()
    if is_enabled:
        model.enable_peft_hotswap(target_rank=8)
    model.load_adapter("old", adapter_name="tuned")
    model.load_adapter("new", adapter_name="tuned", **({} if is_enabled else {"hotswap": True}))
    return model


def load_anew():
    model = load()
    model.load_adapter("old", adapter_name="tuned")
    model.delete_adapter("tuned")
    model.load_adapter("new", adapter_name="tuned")
    return model


def swap_in_peft():
    model = PeftModel.from_pretrained(load(), "old")
    hotswap_adapter(model, "new", "default", torch_device="cpu")
    return model


save(old, "old")
base = answer(load())
cases = {
    "the same settings": ({}, False, "0%"),
    "lora_alpha 8": ({"lora_alpha": 8}, True, "0%"),
    "q_proj alone": ({"target_modules": ["q_proj"]}, True, "0%"),
    "use_rslora": ({"use_rslora": True}, True, "refused"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 64}}, True, "refused"),
}
for name, (change, is_lost, in_peft) in cases.items():
    expected = save(old | change, "new")

    def error(model):
        return float((answer(model) - expected).abs().max() / (expected - base).abs().max())

    found = error(swap_in_transformers(False)), error(swap_in_transformers(True)), error(load_anew())
    try:
        peft = f"{error(swap_in_peft()):.0%}"
    except ValueError as refusal:
        assert "Configs are incompatible" in str(refusal), "this has changed"
        peft = "refused"
    print(f"{name:17} hotswap {found[0]:4.0%}  enabled {found[1]:4.0%}  deleted and loaded {found[2]:.0%}  PEFT {peft}")
    assert all((each > 0.05) == is_lost for each in found[:2]) and found[2] < 1e-3, "this has changed"
    assert peft == in_peft, "this has changed"
PY

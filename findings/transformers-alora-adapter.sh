#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: an activated LoRA adapter, whose configuration has
# `alora_invocation_tokens`, that transformers loads
#
# Guess: `AutoModelForCausalLM.from_pretrained(ADAPTER)` and `model.load_adapter(ADAPTER)` give the logits of
# `PeftModel.from_pretrained(model, ADAPTER)`, where the adapter works from the invocation tokens on, or refuse it.
# What happens: the adapter is loaded and never works: behind the invocation tokens, too, the logits are the base
# model's, to the bit. Where the adapter has to begin is computed by PeftModel alone. Nothing is said. Use PeftModel.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the adapter's largest effect:
#   LoRA            PeftModel 0% AutoModelForCausalLM 0% load_adapter 0%
#   activated LoRA  PeftModel 0% AutoModelForCausalLM 100% load_adapter 100%
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
settings = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def load_adapter():
    model = load()
    model.load_adapter("adapter")
    return model


base = answer(load())
for name, tokens, is_lost in (("LoRA", None, False), ("activated LoRA", [10, 11], True)):
    settings["alora_invocation_tokens"] = tokens
    adapted = get_peft_model(load(), LoraConfig(**settings, init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = "base"
    adapted.save_pretrained("adapter")
    expected = answer(adapted)
    effect = (expected - base).abs().max()
    found = {
        "PeftModel": answer(PeftModel.from_pretrained(load(), "adapter")),
        "AutoModelForCausalLM": answer(AutoModelForCausalLM.from_pretrained("adapter")),
        "load_adapter": answer(load_adapter()),
    }
    errors = {kind: float((logits - expected).abs().max() / effect) for kind, logits in found.items()}
    print(f"{name:15}", *(f"{kind} {error:.0%}" for kind, error in errors.items()))
    assert errors["PeftModel"] < 1e-3, "this has changed"
    for kind in ("AutoModelForCausalLM", "load_adapter"):
        assert torch.equal(found[kind], base) if is_lost else errors[kind] < 1e-3, "this has changed"
PY
if grep -i alora log; then echo "this has changed"; exit 1; fi

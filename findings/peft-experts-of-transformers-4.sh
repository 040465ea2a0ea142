#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0, and peft 0.18.1 with transformers 4.57.6 (the last release of version 4), torch
# 2.13.0: an adapter on the experts of a mixture that was trained with version 4
#
# Guess: the adapter gives the logits that it had, or is refused. In version 4 every expert is a module with LoRA of its
# own; version 5 has all experts in one parameter, and PEFT converts such adapters for it.
# What happens: the conversion is right for Mixtral, Qwen3-MoE and OLMoE. For Qwen2-MoE and Phi-3.5-MoE the weights for
# the experts are left out, and for DeepSeek V3 and GLM-4.5 those for dense layers and shared experts. No missing or
# unexpected weight is named, except in what a second `load_adapter` of the folder returns as `unexpected_keys`. (A
# warning that a pattern was ignored is the same for models that are right.)
# `AutoModelForCausalLM` of the folder gives the same. Merge with version 4: version 5 reads the merged model as it does
# the base model.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the adapter's largest effect, and how many of the
# file's weights are left out:
#   Mixtral     base 0%, adapter   0%, left out  0 of 78
#   Qwen3Moe    base 0%, adapter   0%, left out  0 of 78
#   Olmoe       base 0%, adapter   0%, left out  0 of 78
#   Qwen2Moe    base 0%, adapter  83%, left out 72 of 96
#   Phimoe      base 0%, adapter  81%, left out 72 of 78
#   DeepseekV3  base 0%, adapter 110%, left out 18 of 72
#   Glm4Moe     base 0%, adapter  79%, left out 18 of 72
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for version in 4.57.6 5.23.0; do
  python3 -m venv "$place/$version"
  pip() { "$place/$version/bin/pip" --quiet --disable-pip-version-check "$@"; }
  pip install --no-compile torch==2.13.0
  case $version in 4*) peft=0.18.1 ;; *) peft=0.21.2 ;; esac
  pip install --no-compile "transformers==$version" "peft==$peft"
done
cd "$place"
export HF_HUB_OFFLINE=1
cat > train.py <<'PY'
import sys

import torch
import transformers
from peft import LoraConfig, get_peft_model

two = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
dense_first = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **two}
ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
mixtures = {
    "Mixtral": ({"num_local_experts": 4}, False),
    "Qwen3Moe": ({"num_experts": 4, **two}, False),
    "Olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, False),
    "Qwen2Moe": ({"num_experts": 4, "shared_expert_intermediate_size": 64, **two}, True),
    "Phimoe": ({"num_local_experts": 4}, True),
    "DeepseekV3": ({"head_dim": 16, **dense_first, **ranks}, True),
    "Glm4Moe": ({"head_dim": 32, **dense_first}, True),
}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.2}
ids = torch.arange(1, 41).unsqueeze(0)


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=ids).logits.float()


def train(kind, more):
    """Save a base model and an adapter with random weights; return the logits of both."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **more))
    model.save_pretrained(kind)
    before = answer(model)
    experts = ["w1", "w2", "w3"] if kind in ("Mixtral", "Phimoe") else ["gate_proj", "up_proj", "down_proj"]
    about = {"r": 4, "lora_alpha": 16, "target_modules": ["o_proj", *experts], "task_type": "CAUSAL_LM"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(kind)
    model = get_peft_model(loaded, LoraConfig(**about, init_lora_weights=False))
    model.save_pretrained(f"{kind}-adapter")
    return before, answer(model)


if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), transformers.__version__
    torch.save({kind: train(kind, more) for kind, (more, _) in mixtures.items()}, "logits.pt")
PY
cat > load.py <<'PY'
import warnings

import torch
from peft import PeftModel
from safetensors import safe_open
from train import answer, mixtures
from transformers import AutoModelForCausalLM

for kind, (base, trained) in torch.load("logits.pt").items():
    effect, is_lost = float((trained - base).abs().max()), mixtures[kind][1]
    as_base = float((answer(AutoModelForCausalLM.from_pretrained(kind)) - base).abs().max()) / effect
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(kind), f"{kind}-adapter")
    assert not [each for each in said if "missing" in str(each.message) or "unexpected" in str(each.message)], said
    with safe_open(f"{kind}-adapter/adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
        count = len(names)
    here = {name.replace(".default", "") for name, _ in model.named_parameters()}
    if any(".experts." in name and "lora_" in name for name in here):  # the experts' are there, under other names
        names = {name for name in names if ".experts." not in name}
    left = len(names - here)
    found = float((answer(model) - trained).abs().max()) / effect
    whole = float((answer(AutoModelForCausalLM.from_pretrained(f"{kind}-adapter")) - trained).abs().max()) / effect
    print(f"{kind:10}  base {as_base:.0%}, adapter {found:4.0%}, left out {left:2} of {count}")
    assert as_base < 1e-3 and (found > 0.1) == (whole > 0.1) == (left > 0) == is_lost, "this has changed"
    assert is_lost or max(found, whole) < 1e-3, "this has changed"
PY
4.57.6/bin/python -W ignore train.py 2> log || { tail -30 log; exit 1; }
5.23.0/bin/python load.py 2> log || { tail -30 log; exit 1; }

#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: an adapter that has taken another one's place by PEFT's
# `hotswap_adapter`, and is saved
#
# Guess: `save_pretrained` writes the adapter that the model has, so that the folder gives the same logits when it is
# loaded.
# What happens: the swap sets the scale of the layers and leaves `model.peft_config` as it is. The new weights are saved
# with the old adapter's lora_alpha and r, and the folder is loaded with the old scale. A smaller rank is filled up with
# zeros, so that even the shapes fit. Nothing is said. The model in memory, and what is merged from it, are right. Pass
# on the new adapter's own folder in place of saving.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the new adapter's largest effect; the old adapter
# has rank 8 and lora_alpha 8:
#   rank 8, lora_alpha 8    in memory 0%, merged 0%, saved and loaded   0%
#   rank 8, lora_alpha 32   in memory 0%, merged 0%, saved and loaded  91%
#   rank 4, lora_alpha 8    in memory 0%, merged 0%, saved and loaded  78%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" - 2> log <<'PY' || { tail -30 log; exit 1; }
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def train(name, rank, alpha):
    """Save an adapter with random weights; return its logits."""
    shared = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(load(), LoraConfig(r=rank, lora_alpha=alpha, **shared, init_lora_weights=False))
    model.save_pretrained(name)
    return answer(model)


before = answer(load())
train("old", 8, 8)
for rank, alpha, is_lost in ((8, 8, False), (8, 32, True), (4, 8, True)):
    name = f"new-{rank}-{alpha}"
    expected = train(name, rank, alpha)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(scal|rank|alpha|config|missing|unexpected)")
        model = PeftModel.from_pretrained(load(), "old")
        hotswap_adapter(model, name, adapter_name="default")
        in_memory = answer(model)
        model.save_pretrained(f"{name}-saved")
        loaded = answer(PeftModel.from_pretrained(load(), f"{name}-saved"))
        merged = answer(model.merge_and_unload())
    effect = float((expected - before).abs().max())
    found = [float((each - expected).abs().max()) / effect for each in (in_memory, merged, loaded)]
    about = f"rank {rank}, lora_alpha {alpha}"
    print(f"{about:22}  in memory {found[0]:.0%}, merged {found[1]:.0%}, saved and loaded {found[2]:4.0%}")
    assert max(found[:2]) < 1e-3 and (found[2] > 0.1) == is_lost and (is_lost or found[2] < 1e-3), "this has changed"
PY

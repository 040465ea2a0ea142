#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: one of two adapters with `modules_to_save` is merged, or all
# are unloaded
#
# Guess: `merge_and_unload(adapter_names=["two"])` gives the logits that the model has after `set_adapter("two")`, and
# `unload()` gives the base model's.
# What happens: the argument is for the LoRA layers alone. Of the modules that were trained whole, those of the active
# adapter are kept, which is the one that was loaded first: the merged model has the layers of one and the head of the
# other. `unload()` keeps the active adapter's whole modules, so that what is left is no base model. Nothing is said.
# Call `set_adapter` before the merge, and load the base model again in place of `unload()`. LoRA alone is right, and so
# are trained tokens.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the adapter's largest effect:
#   LoRA alone                    merged by name   0%, after set_adapter 0%, unloaded   0%
#   modules_to_save lm_head       merged by name  63%, after set_adapter 0%, unloaded  43%
#   modules_to_save norm          merged by name 110%, after set_adapter 0%, unloaded  85%
#   trainable_token_indices       merged by name   0%, after set_adapter 0%, unloaded   0%
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
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def train(name, **settings):
    """Save an adapter with random weights; return its logits."""
    shared = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(load(), LoraConfig(**shared, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(name)
    return answer(model)


def load_both():
    model = PeftModel.from_pretrained(load(), "one", adapter_name="one")
    model.load_adapter("two", "two")
    return model


before = answer(load())
cases = {
    "LoRA alone": ({}, False),
    "modules_to_save lm_head": ({"modules_to_save": ["lm_head"]}, True),
    "modules_to_save norm": ({"modules_to_save": ["norm"]}, True),
    "trainable_token_indices": ({"trainable_token_indices": [3, 5]}, False),
}
for name, (settings, is_mixed) in cases.items():
    first, second = train("one", **settings), train("two", **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load_both()
        by_name = answer(model.merge_and_unload(adapter_names=["two"]))
        unloaded = answer(load_both().unload())
    assert not [each for each in said if "merge" in str(each.message) or "modules_to_save" in str(each.message)], said
    model = load_both()
    model.set_adapter("two")
    assert torch.allclose(answer(model), second, atol=1e-4), "this has changed"
    active = answer(model.merge_and_unload())
    effect = float((second - before).abs().max())
    found = [float((each - second).abs().max()) / effect for each in (by_name, active)]
    found.append(float((unloaded - before).abs().max() / (first - before).abs().max()))
    print(f"{name:28}  merged by name {found[0]:4.0%}, after set_adapter {found[1]:.0%}, unloaded {found[2]:4.0%}")
    assert (found[0] > 0.1) == (found[2] > 0.1) == is_mixed and found[1] < 1e-3, "this has changed"
    assert is_mixed or max(found) < 1e-3, "this has changed"
PY

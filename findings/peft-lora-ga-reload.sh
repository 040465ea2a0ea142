#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: an adapter that was trained with `init_lora_weights="lora_ga"`
#
# Guess: `PeftModel.from_pretrained` gives the logits that the adapter had when `save_pretrained` saved it, as PEFT's
# own example saves it.
# What happens: LoRA-GA moves a part of each base weight into the adapter. It needs gradients of the training rows for
# that, and a load has none: it leaves the base weights as they are, so that this part is there twice. Nothing is said,
# and `AutoPeftModelForCausalLM` and `merge_and_unload` give the same wrong model. PEFT's documentation says that the
# base weights change, and names `save_embedding_layers`, which does not help, and `save_mutated_as_lora`, which does
# not exist. What helps is to save the new adapter before training, with `init_lora_weights` of its configuration set to
# True, and to give `save_pretrained` that folder as `path_initial_model_for_weight_conversion`.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the adapter's largest effect:
#   LoRA     PeftModel 0% AutoPeftModel 0% merged 0% with embeddings 0% converted 0%
#   LoRA-GA  PeftModel 45% AutoPeftModel 45% merged 45% with embeddings 45% converted 0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import warnings

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from peft.tuners.lora import preprocess_loraga
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
shared = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ids = torch.arange(1, 20).unsqueeze(0)


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=ids).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def train(settings):
    """Return the logits of a new adapter and of the trained one, which is saved as it is and as plain LoRA."""
    model = load()
    config = LoraConfig(**shared, **settings)
    if settings:
        preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())
    model = get_peft_model(model, config)
    new, kind = answer(model), config.init_lora_weights
    config.init_lora_weights = True
    model.save_pretrained("new")
    config.init_lora_weights = kind
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained("saved")
    model.save_pretrained("embeddings", save_embedding_layers=True)
    model.save_pretrained("plain", path_initial_model_for_weight_conversion="new")
    return new, answer(model)


base = answer(load())
ways = {
    "PeftModel": (lambda: PeftModel.from_pretrained(load(), "saved"), True),
    "AutoPeftModel": (lambda: AutoPeftModelForCausalLM.from_pretrained("saved"), True),
    "merged": (lambda: PeftModel.from_pretrained(load(), "saved").merge_and_unload(), True),
    "with embeddings": (lambda: PeftModel.from_pretrained(load(), "embeddings"), True),
    "converted": (lambda: PeftModel.from_pretrained(load(), "plain"), False),
}
lora_ga = {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}
for name, settings in {"LoRA": {}, "LoRA-GA": lora_ga}.items():
    new, expected = train(settings)
    assert (new - base).abs().max() < 1e-4 * base.abs().max()
    errors = {}
    for way, (open_model, is_lost) in ways.items():
        with warnings.catch_warnings(action="error", category=UserWarning):
            found = answer(open_model())
        errors[way] = float((found - expected).abs().max() / (expected - base).abs().max())
        assert (errors[way] > 0.05) == (is_lost and bool(settings)), "this has changed"
    print(f"{name:8}", *(f"{way} {error:.0%}" for way, error in errors.items()))
PY

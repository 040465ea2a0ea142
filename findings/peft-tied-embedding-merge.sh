#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: LoRA on the embedding of a model whose output layer is tied to
# it, as SmolLM2's, Llama 3.2's and small Qwen's are
#
# Guess: with `ensure_weight_tying=True` both layers train one delta, so `merge_and_unload` adds it to the one weight
# that they share, and the merged model gives the adapter's logits.
# What happens: both layers add it, so that the shared weight has it twice. The warning on tied layers is given, as it
# is without the setting (there the merged model cannot be right). Halve the scale of both layers before the merge, with
# `layer.scaling[NAME] /= 2`: then the logits are the adapter's. (`scale_layer(0.5)` leaves an embedding as it is.)
#
# Seen on 2026-11-30, what is added to the shared weight, in deltas, and the largest difference of a logit, relative to
# the adapter's largest effect:
#   embed_tokens merged 2.00 deltas, a difference of 71%
#   embed_tokens halved 1.00 deltas, a difference of 0%
#   lm_head      merged 2.00 deltas, a difference of 158%
#   lm_head      halved 1.00 deltas, a difference of 0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, tie_word_embeddings=True)).save_pretrained("base")


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


before = answer(load())
weight = load().lm_head.weight.detach().clone()
for module in ("embed_tokens", "lm_head"):
    for is_halved in (False, True):
        shared = {"r": 4, "lora_alpha": 4, "target_modules": [module], "task_type": "CAUSAL_LM"}
        model = get_peft_model(load(), LoraConfig(**shared, init_lora_weights=False, ensure_weight_tying=True))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.2)
        expected = answer(model)
        layers = model.get_input_embeddings(), model.get_output_embeddings()
        deltas = [layer.get_delta_weight("default").detach() for layer in layers]
        assert torch.equal(*deltas), "this has changed"
        model.save_pretrained("adapter")
        loaded = PeftModel.from_pretrained(load(), "adapter")
        assert torch.allclose(answer(loaded), expected, atol=1e-5), "this has changed"
        if is_halved:
            for layer in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
                layer.scaling["default"] /= 2
        loaded.merge_and_unload().save_pretrained("merged")
        merged = AutoModelForCausalLM.from_pretrained("merged")
        added = merged.lm_head.weight.detach() - weight
        count = float((added * deltas[0]).sum() / (deltas[0] * deltas[0]).sum())
        error = float((answer(merged) - expected).abs().max() / (expected - before).abs().max())
        print(f"{module:12} {'halved' if is_halved else 'merged':6} {count:.2f} deltas, a difference of {error:.0%}")
        assert abs(count - (1 if is_halved else 2)) < 0.01 and (error < 1e-3) == is_halved, "this has changed"
PY

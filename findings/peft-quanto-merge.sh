#!/usr/bin/env bash
# peft 0.21.2 and optimum-quanto 0.2.7, with transformers 5.23.0 and torch 2.13.0: merging on quantized weights
#
# Guess: `merge_and_unload()` on a model with `QuantoConfig` raises, or gives the adapter's logits within the precision
# of the quantized weights.
# What happens: the adapter works until it is merged, and is then gone. The model that is returned is the base model, to
# the bit, with `safe_merge=True` too, and nothing is said. Merge on weights that are not quantized, and quantize then.
#
# Seen on 2026-11-30:
#   not quantized: merged, the model has the adapter's logits: True, the base model's: False
#   int8: merged, the model has the adapter's logits: False, the base model's: True
#   int8, safe_merge: merged, the model has the adapter's logits: False, the base model's: True
#   int4: merged, the model has the adapter's logits: False, the base model's: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0 \
    optimum-quanto==0.2.7
cd "$place"
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, QuantoConfig


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(8).unsqueeze(0)).logits


def is_same(one, other):
    return bool(((one - other).abs().max() / other.abs().max()) < 0.001)


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
for weights, is_safe in ((None, False), ("int8", False), ("int8", True), ("int4", False)):
    options = {"quantization_config": QuantoConfig(weights=weights)} if weights else {}
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained("base", **options), lora).eval()
    with tuned.disable_adapter():
        base = logits(tuned)
    adapted = logits(tuned)
    assert not is_same(base, adapted)
    merged = logits(tuned.merge_and_unload(safe_merge=is_safe))
    found = is_same(merged, adapted), is_same(merged, base)
    name = f"{weights or 'not quantized'}{', safe_merge' if is_safe else ''}"
    print(f"{name}: merged, the model has the adapter's logits: {found[0]}, the base model's: {found[1]}")
    assert found == (weights is None, weights is not None), "this has changed"
PY

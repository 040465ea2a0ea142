#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0, compressed-tensors 0.20.1 and torch 2.13.0: `merge_and_unload(safe_merge=True)`
# on a model in INT8, as llm-compressor's scheme W8A8 writes it
#
# Guess: the merge raises, as without `safe_merge`, or gives the adapter's logits within the precision of the weights.
# What happens: the adapter works until it is merged, and is then gone: the delta is rounded to whole numbers before it
# is added to the codes, and is 0. The model that is returned is the base model, to the bit, and so is the one that it
# saves; nothing is said. Without `safe_merge` an error is raised. Merge on weights that are not quantized, and quantize
# then.
#
# Seen on 2026-12-01, of the merged model:
#   plain safe_merge: from the adapter's logits 0%, from the base model's 100%
#   plain without: merged
#   int8  safe_merge: from the adapter's logits 100%, from the base model's 0%
#   int8  without: an error
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.23.0 compressed-tensors==0.20.1
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, initializer_range=0.1)).save_pretrained("plain")
LlamaForCausalLM.from_pretrained("plain").save_pretrained("int8")

# One scale for each row of a weight, and one for each token of the inputs, as in W8A8.
tensors = load_file("int8/model.safetensors")
for name in [name for name in tensors if "_proj" in name]:
    scale = tensors[name].abs().amax(dim=1, keepdim=True) / 127
    tensors[name + "_scale"], tensors[name] = scale, (tensors[name] / scale).round().to(torch.int8)
save_file(tensors, "int8/model.safetensors", {"format": "pt"})
weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
inputs = {**weights, "strategy": "token", "dynamic": True}
group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "int-quantized"}
config = json.loads(Path("int8/config.json").read_text())
config["quantization_config"] = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
config["quantization_config"] |= {"format": "int-quantized", "ignore": ["lm_head"], "config_groups": {"all": group}}
Path("int8/config.json").write_text(json.dumps(config))


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits.float()


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


whole = answer(load("plain"))
settings = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
for folder, is_lost in (("plain", False), ("int8", True)):
    base = answer(load(folder))
    assert (base - whole).abs().max() < 0.1 * whole.abs().max()
    adapted = get_peft_model(load(folder), LoraConfig(**settings, init_lora_weights=False))
    adapted.save_pretrained("adapter")
    expected = answer(adapted)
    effect = (expected - base).abs().max()
    with warnings.catch_warnings(action="error", category=UserWarning):
        merged = PeftModel.from_pretrained(load(folder), "adapter").merge_and_unload(safe_merge=True)
    found = answer(merged)
    error, change = (float((found - each).abs().max() / effect) for each in (expected, base))
    print(f"{folder:5} safe_merge: from the adapter's logits {error:.0%}, from the base model's {change:.0%}")
    assert (torch.equal(found, base) and error > 0.5) if is_lost else error < 1e-3, "this has changed"
    merged.save_pretrained("merged")
    assert torch.equal(answer(load("merged")), found), "this has changed"
    try:
        PeftModel.from_pretrained(load(folder), "adapter").merge_and_unload()
        refused = False
    except RuntimeError as error:
        refused = "can't be cast" in str(error)
    print(f"{folder:5} without: {'an error' if refused else 'merged'}")
    assert refused == is_lost, "this has changed"
PY

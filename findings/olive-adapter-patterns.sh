#!/usr/bin/env bash
# olive-ai 0.13.0, with peft 0.21.2, transformers 5.23.0 and torch 2.13.0: `olive convert-adapters`, for ONNX Runtime
#
# Guess: the converted weights hold the adapter's scale, which is multiplied into lora_B, for every module, or the
# adapter is refused, as one with DoRA is.
# What happens: one scale, of `r` and `lora_alpha`, is multiplied into all modules. Those that `rank_pattern` or
# `alpha_pattern` name get it too, and so have a wrong strength; nothing is said. use_rslora is right. Convert such an
# adapter only after its weights have been rewritten with one rank and one scale.
#
# Seen on 2026-11-30, the delta in the file, as a factor of PEFT's; the adapter has r 8 and lora_alpha 32:
#   one rank and scale       q_proj 1.00  down_proj 1.00
#   use_rslora               q_proj 1.00  down_proj 1.00
#   alpha_pattern q_proj 64  q_proj 0.50  down_proj 1.00
#   rank_pattern q_proj 2    q_proj 0.25  down_proj 1.00
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile olive-ai==0.13.0 peft==0.21.2 transformers==5.23.0 torch==2.13.0 onnx==1.23.2 requests==2.34.2
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 OLIVE_DISABLE_TELEMETRY=1
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import subprocess
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
shared = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
cases = {
    "one rank and scale": ({}, 1.0),
    "use_rslora": ({"use_rslora": True}, 1.0),
    "alpha_pattern q_proj 64": ({"alpha_pattern": {"q_proj": 64}}, 0.5),
    "rank_pattern q_proj 2": ({"rank_pattern": {"q_proj": 2}}, 0.25),
}
for name, (settings, expected) in cases.items():
    lora = LoraConfig(**shared, **settings, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), lora)
    model.save_pretrained("adapter")
    command = ["convert-adapters", "-a", "adapter", "-o", "weights", "--adapter_format", "safetensors"]
    command += ["--dtype", "float32", "--disable_telemetry"]
    subprocess.run([sys.executable, "-m", "olive", *command], check=True, stdout=sys.stderr)
    weights = load_file("weights.safetensors")
    layer = model.base_model.model.model.layers[0]
    factors = []
    for place, module in {"self_attn.q_proj": layer.self_attn.q_proj, "mlp.down_proj": layer.mlp.down_proj}.items():
        found = [weights[f"model.layers.0.{place}.lora_{letter}.weight"] for letter in "AB"]
        delta = module.get_delta_weight("default").detach()
        factors.append(float((found[0] @ found[1]).T.flatten() @ delta.flatten() / (delta * delta).sum()))
    print(f"{name:24} q_proj {factors[0]:.2f}  down_proj {factors[1]:.2f}")
    assert abs(factors[0] - expected) < 0.01 and abs(factors[1] - 1) < 0.01, "this has changed"
PY

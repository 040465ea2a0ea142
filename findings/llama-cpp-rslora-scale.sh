#!/usr/bin/env bash
# llama.cpp 0.4.0, convert_lora_to_gguf.py, as node-llama-cpp 3.21.1 bundles it; with peft 0.21.2
#
# Guess: an adapter that was trained with use_rslora is applied by llama.cpp with the scale that PEFT applies it with.
# What happens: PEFT scales by alpha / sqrt(r), and the converter writes alpha alone, whatever use_rslora is. llama.cpp
# divides alpha by the rank (llama_adapter_lora_weight::get_scale), and nothing is said. With rank 16 the adapter has a
# quarter of its strength. `--lora-scaled FILE:4`, by the square root of the rank, gives it back.
#
# Seen on 2026-11-28:
#   use_rslora False: PEFT scales by 2.0, the file says alpha 32.0, llama.cpp scales by 2.0
#   use_rslora True: PEFT scales by 8.0, the file says alpha 32.0, llama.cpp scales by 2.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
npm install --silent --no-fund --no-audit --ignore-scripts --omit=optional --prefix "$place" node-llama-cpp@3.21.1
git clone --quiet --config advice.detachedHead=false "$place/node_modules/node-llama-cpp/llama/gitRelease.bundle" "$place/llama.cpp"
grep -n -A 3 "float get_scale" "$place/llama.cpp/src/llama-adapter.h"
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0 \
    sentencepiece==0.2.3 protobuf==7.36.2 requests==2.34.2
cd "$place"
PYTHONPATH="$place/llama.cpp/gguf-py" "$place/env/bin/python" -W ignore - <<'PY'
import math
import subprocess
import sys
from gguf import GGUFReader
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
base.save_pretrained("base")
for uses in (False, True):
    lora = LoraConfig(r=16, lora_alpha=32, use_rslora=uses, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(base.config), lora)
    model.save_pretrained("adapter")
    applied = model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
    command = ["llama.cpp/convert_lora_to_gguf.py", "adapter", "--base", "base", "--outtype", "f32"]
    subprocess.run([sys.executable, *command, "--outfile", "lora.gguf"], check=True, capture_output=True)
    alpha = float(GGUFReader("lora.gguf").get_field("adapter.lora.alpha").contents())
    print(f"use_rslora {uses}: PEFT scales by {applied}, the file says alpha {alpha}, llama.cpp scales by {alpha / 16}")
    assert (applied, alpha) == (32 / math.sqrt(16) if uses else 2.0, 32.0), "this has changed"
PY

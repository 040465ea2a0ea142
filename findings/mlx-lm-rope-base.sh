#!/usr/bin/env bash
# mlx-lm 0.32.2 (on Linux with mlx-cpu 0.32.4): models that transformers 5.23.0 has saved, with torch 2.13.0
#
# Guess: mlx-lm gives the logits of transformers, or refuses the folder.
# What happens: transformers 5 writes the base of the rotary embedding and its scaling under `rope_parameters` in
# config.json. Some of mlx-lm's models read that key, as Qwen3's, and others refuse the folder, as Granite's. Those
# of Llama (also SmolLM2), Mistral, Qwen2, Phi-3, SmolLM3, OLMo 2, StarCoder2 and Gemma 3 rotate with the default of
# their class, without scaling, and nothing is said. Only Qwen2.5 and the smallest Gemma 3 have that base. With the base
# as `rope_theta` and the scaling as `rope_scaling` in config.json too, the logits are those of transformers.
#
# Seen on 2026-11-30, the largest difference of a logit, relative to the largest logit:
#   Llama 2           as saved 0%, with both keys beside 0%
#   SmolLM2           as saved 108%, with both keys beside 0%
#   Llama 3.2         as saved 123%, with both keys beside 0%
#   Mistral           as saved 124%, with both keys beside 0%
#   Qwen2.5           as saved 0%, with both keys beside 0%
#   Qwen2.5-Math      as saved 123%, with both keys beside 0%
#   Qwen3             as saved 0%, with both keys beside 0%
#   Phi-4             as saved 143%, with both keys beside 0%
#   Gemma 3           as saved 0%, with both keys beside 0%
#   Gemma 3, scaling  as saved 6%, with both keys beside 0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 mlx==0.32.4 mlx-cpu==0.32.4 jinja2==3.1.6
pip install --no-deps mlx-lm==0.32.2
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import pathlib

import mlx.core
import numpy
import torch
import transformers
from mlx_lm.utils import load_model

llama = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama |= {"original_max_position_embeddings": 8192}
linear = {"rope_type": "linear", "factor": 8.0}
known = {
    "Llama 2": ("Llama", 1e4, None, False),
    "SmolLM2": ("Llama", 1e5, None, True),
    "Llama 3.2": ("Llama", 5e5, llama, True),
    "Mistral": ("Mistral", 1e6, None, True),
    "Qwen2.5": ("Qwen2", 1e6, None, False),
    "Qwen2.5-Math": ("Qwen2", 1e4, None, True),
    "Qwen3": ("Qwen3", 1e6, None, False),
    "Phi-4": ("Phi3", 2.5e5, None, True),
    "Gemma 3": ("Gemma3", 1e6, None, False),
    "Gemma 3, scaling": ("Gemma3", 1e6, linear, True),
}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16}
sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 131072, "initializer_range": 0.3}
sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ids = numpy.arange(1, 41)[None]


def difference(folder, expected):
    found = numpy.array(load_model(pathlib.Path(folder))[0](mlx.core.array(ids)).astype(mlx.core.float32))
    return float(abs(found - expected).max() / abs(expected).max())


torch.manual_seed(0)
for name, (kind, base, scaling, is_lost) in known.items():
    rope, more = {"rope_type": "default", "rope_theta": base} | (scaling or {}), {}
    if kind == "Gemma3":
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
        more = {"query_pre_attn_scalar": 16}
    about = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, about)(**sizes, **more, rope_parameters=rope)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(name)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids)).logits.numpy()
    differences = [difference(name, expected)]
    with open(f"{name}/config.json", encoding="utf-8") as file:
        saved = json.load(file)
    with open(f"{name}/config.json", "w", encoding="utf-8") as file:
        json.dump(saved | {"rope_theta": base, "rope_scaling": scaling}, file)
    differences.append(difference(name, expected))
    print(f"{name:16} as saved {differences[0]:.0%}, with both keys beside {differences[1]:.0%}")
    assert differences[1] < 1e-3 and (differences[0] > 0.01) == is_lost, "this has changed"
PY
if grep -i rope log; then echo "this has changed"; exit 1; fi

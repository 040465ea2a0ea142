#!/usr/bin/env bash
# onnxruntime-genai 0.18.0, with onnxruntime 1.32.0, transformers 5.23.0 and torch 2.13.0: `models.builder` and models
# whose rotary embedding is scaled
#
# Guess: a model that was built in float32 gives the logits of transformers, or is refused, as it is with a kind of
# scaling that the builder does not know.
# What happens: for Llama, of which DeepSeek Coder has linear scaling, and for SmolLM3, which is given YaRN for long
# texts, the scaling is left out unless it is Llama 3's. For the others YaRN is computed without rounding its bounds, as
# with `"truncate": false`, which is not the default. Nothing is said. Use another engine for Llama and SmolLM3 then.
# Llama 3.2, and linear scaling of the others, are right.
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the largest logit, from transformers: with the
# model as it is, without its scaling, and with "truncate" false:
#   Llama   llama3    0%  12%
#   Llama   linear  153%   0%
#   Llama   yarn     54%   0%  67%
#   SmolLM3 yarn     58%   0%  65%
#   Qwen2   linear    0% 123%
#   Qwen3   yarn      5%   8%   0%
#   Mistral yarn     51%  54%   0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 onnx==1.23.2
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import subprocess
import sys

import numpy
import onnxruntime_genai
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

words = [f"word{number}" for number in range(96)]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
special = {"unk_token": words[0], "pad_token": words[0], "bos_token": words[1], "eos_token": words[2]}
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, **special)

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192, "initializer_range": 0.3}
sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ids = [(7 * place + 3) % 61 + 3 for place in range(100)]
plain = {"rope_type": "default", "rope_theta": 1e6}
linear = {**plain, "rope_type": "linear", "factor": 4.0}
yarn = {**linear, "rope_type": "yarn", "original_max_position_embeddings": 2048, "beta_fast": 32.0, "beta_slow": 1.0}
llama = {**yarn, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def ask_transformers(name, rope, weights=None):
    config = getattr(transformers, f"{name}Config")(**sizes, rope_parameters=rope)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        return model, model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()


def ask_builder(model):
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "model", "-o", "built"]
    said = subprocess.run([*command, "-p", "fp32", "-e", "cpu", "-c", "cache"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "scaling" not in said.stdout + said.stderr, "this has changed"
    built = onnxruntime_genai.Model("built")
    settings = onnxruntime_genai.GeneratorParams(built)
    settings.set_search_options(max_length=128)
    generator = onnxruntime_genai.Generator(built, settings)
    generator.append_tokens(numpy.array([ids], dtype=numpy.int32))
    return numpy.array(generator.get_logits()).reshape(-1)[-96:]


cases = [
    ("Llama", "llama3", llama, (True, False, None)),
    ("Llama", "linear", linear, (False, True, None)),
    ("Llama", "yarn", yarn, (False, True, False)),
    ("SmolLM3", "yarn", yarn, (False, True, False)),
    ("Qwen2", "linear", linear, (True, False, None)),
    ("Qwen3", "yarn", yarn, (False, False, True)),
    ("Mistral", "yarn", yarn, (False, False, True)),
]
for name, kind, rope, expected in cases:
    torch.manual_seed(0)
    model, logits = ask_transformers(name, rope)
    found = ask_builder(model)
    weights = model.state_dict()
    others = [logits, ask_transformers(name, plain, weights)[1]]
    if kind == "yarn":
        others.append(ask_transformers(name, {**rope, "truncate": False}, weights)[1])
    differences = [abs(found - each).max() / abs(each).max() for each in others]
    print(f"{name:7} {kind:7}", *(f"{each:4.0%}" for each in differences))
    for difference, is_same in zip(differences, expected):
        assert (difference < 1e-3) if is_same else (difference > 0.02), "this has changed"
PY

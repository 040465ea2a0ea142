#!/usr/bin/env bash
# ctranslate2 4.8.5, with transformers 5.23.0 and torch 2.13.0: models whose rotary embedding is scaled
#
# Guess: a converted Llama 3.2 gives the logits of transformers, because the converter names `llama3` among the kinds of
# scaling that it supports, and refuses others.
# What happens: the factor is written for the kind `linear` alone. Llama 3.1, 3.2 and 3.3 are rotated as if there were
# no scaling, and so is Gemma 3 from 4B on, whose scaling is not looked at; nothing is said. Another engine has to run
# these models. Llama without scaling, or with linear scaling, is right.
#
# Seen on 2026-11-30, the largest difference of a logit over 600 tokens, relative to the largest logit:
#   Llama 3.0        0%
#   Llama, linear    0%
#   Llama 3.1        145%
#   Llama 3.2        96%
#   Gemma 3          0%
#   Gemma 3, linear  6%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 ctranslate2==4.8.5
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import ctranslate2
import numpy
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

words = [f"word{number}" for number in range(64)]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
special = {"unk_token": words[0], "pad_token": words[0], "bos_token": words[1], "eos_token": words[2]}
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known, **special)

llama = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama |= {"original_max_position_embeddings": 8192}
linear = {"rope_type": "linear", "factor": 8.0}
models = {
    "Llama 3.0": ("Llama", 5e5, {"rope_type": "default"}, False),
    "Llama, linear": ("Llama", 1e4, linear, False),
    "Llama 3.1": ("Llama", 5e5, {**llama, "factor": 8.0}, True),
    "Llama 3.2": ("Llama", 5e5, {**llama, "factor": 32.0}, True),
    "Gemma 3": ("Gemma3", 1e6, {"rope_type": "default"}, False),
    "Gemma 3, linear": ("Gemma3", 1e6, linear, True),
}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 1}
sizes |= {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64, "max_position_embeddings": 131072}
sizes |= {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ids = [1, *((7 * place + 3) % 61 + 3 for place in range(599))]
torch.manual_seed(0)
for name, (kind, base, scaling, is_lost) in models.items():
    rope, more = {**scaling, "rope_theta": base}, {}
    if kind == "Gemma3":
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
        more = {"query_pre_attn_scalar": 64}
    about = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, about)(**sizes, **more, rope_parameters=rope)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    TransformersConverter(name).convert(f"{name}, converted")
    generator = ctranslate2.Generator(f"{name}, converted", compute_type="float32")
    found = numpy.array(generator.forward_batch([[words[each] for each in ids]]))[0]
    difference = abs(found - expected).max() / abs(expected).max()
    print(f"{name:16} {difference:.0%}")
    assert (difference > 0.02) if is_lost else (difference < 1e-3), "this has changed"
PY
if grep -i rope log; then echo "this has changed"; exit 1; fi

#!/usr/bin/env bash
# ctranslate2 4.8.5, with transformers 5.23.0 and torch 2.13.0: Gemma 2, which bounds its attention scores and logits
#
# Guess: a converted Gemma 2 gives the logits of transformers; `Gemma2Config` is among the models of the converter.
# What happens: `attn_logit_softcapping` and `final_logit_softcapping` are left out, and nothing is said. The first
# changes every hidden state where scores are high. Without the second the logits are larger, so that sampling is more
# certain than it was measured, and log probabilities are others. Another engine has to run these models.
#
# Seen on 2026-11-30, the largest difference of a logit, relative to the largest logit, and of a probability:
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

attention, final = "attn_logit_softcapping", "final_logit_softcapping"
models = {"as published": {}, "no bound": {attention: None, final: None}}
models |= {"attention alone": {final: None}, "logits alone": {attention: None}}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.3, "query_pre_attn_scalar": 16}
sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ids = [1, *((7 * place + 3) % 61 + 3 for place in range(39))]
for name, bounds in models.items():
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **bounds)).eval()
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    TransformersConverter(name).convert(f"{name}, converted")
    generator = ctranslate2.Generator(f"{name}, converted", compute_type="float32")
    found = torch.tensor(numpy.array(generator.forward_batch([[words[each] for each in ids]]))[0])
    difference = float((found - expected).abs().max() / expected.abs().max())
    probability = float((found.softmax(-1) - expected.softmax(-1)).abs().max())
    print(f"{name:16} {difference:.1%}, {probability:.1%}")
    assert (difference < 1e-4) if name == "no bound" else (difference > 0.002), "this has changed"
PY
if grep -i cap log; then echo "this has changed"; exit 1; fi

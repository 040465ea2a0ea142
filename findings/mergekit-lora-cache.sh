#!/usr/bin/env bash
# mergekit 0.1.5, with peft 0.21.2, transformers 5.23.0 and torch 2.13.0: a model named as BASE+ADAPTER
#
# Guess: `mergekit-yaml` merges the adapter that is in the folder, and a copy that an earlier run has left in
# `--lora-merge-cache` is used only for the same adapter.
# What happens: the copy is found by the paths of base and adapter alone. An adapter that has been trained again and
# stands in the same folder is not read: the result is that of the earlier run, and nothing is said. The tokenizer and
# the chat template in the adapter's folder are not looked at either. Empty the cache before each run, or give each
# job's adapter a folder of its own, and copy the adapter's tokenizer files into the result.
#
# Seen on 2026-11-30:
#   the first adapter           its logits: True   its chat template: False
#   trained again               its logits: False  the first adapter's: True
#   after emptying the cache    its logits: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 immutables==0.21 \
    scipy==1.17.1 sentencepiece==0.2.3 click==8.5.1
pip install --no-compile --no-deps mergekit==0.1.5
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 PATH="$place/env/bin:$PATH"
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import os
import shutil
import subprocess
import sys

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

base, adapter = os.path.abspath("base"), os.path.abspath("adapter")
words = [f"word{number}" for number in range(64)]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))


def save_tokenizer(folder, template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token=words[0], eos_token=words[1])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def train(seed):
    torch.manual_seed(seed)
    settings = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(adapter)
    save_tokenizer(adapter, "tuned")
    return answer(model)


def merge():
    shutil.rmtree("merged", ignore_errors=True)
    recipe = {"merge_method": "linear", "dtype": "float32"}
    recipe["models"] = [{"model": f"{base}+{adapter}", "parameters": {"weight": 1.0}}]
    with open("recipe.yml", "w", encoding="utf-8") as file:
        json.dump(recipe, file)
    command = ["mergekit-yaml", "recipe.yml", "merged", "--lora-merge-cache", "merged-adapters", "--copy-tokenizer"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return answer(AutoModelForCausalLM.from_pretrained("merged"))


def are_same(found, expected):
    return bool(torch.allclose(found, expected, atol=1e-3))


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained(base)
save_tokenizer(base, "base")
first = train(1)
found = merge()
has_template = AutoTokenizer.from_pretrained("merged").chat_template == "tuned"
print(f"the first adapter           its logits: {are_same(found, first)!s:5}  its chat template: {has_template}")
assert are_same(found, first) and not has_template, "this has changed"
second = train(2)
found = merge()
is_new, is_old = are_same(found, second), are_same(found, first)
print(f"trained again               its logits: {is_new!s:5}  the first adapter's: {is_old}")
assert is_old and not is_new, "this has changed"
shutil.rmtree("merged-adapters")
found = merge()
print(f"after emptying the cache    its logits: {are_same(found, second)!s:5}")
assert are_same(found, second), "this has changed"
PY

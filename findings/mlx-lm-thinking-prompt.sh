#!/usr/bin/env bash
# mlx-lm 0.32.2 (on Linux with mlx-cpu 0.32.4), with transformers 5.17.0 and the models' chat templates that trl 1.16.0
# brings
#
# Guess: mlx-lm asks and trains a model with the text that transformers renders with the model's chat template.
# What happens: it always gives the template `enable_thinking`, as true if the vocabulary has <think> and </think>, or
# Gemma 4's <|channel> and <channel|>; nothing is said. Templates that do not think unless they are told to, as Gemma
# 4's and that of Qwen3.5's small models, get another prompt, and Gemma 4's another text in training too. Give
# `{"enable_thinking": false}` as --chat-template-args of mlx_lm.server; mlx_lm.lora has no such option.
#
# Seen on 2026-11-30:
#   gemma4_v5        the prompt is that of transformers: False  the trained text: False
#     transformers '<bos><|turn>user\nHi<turn|>\n<|turn>model\n'
#     mlx-lm       '<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n'
#   qwen3_5_nothink  the prompt is that of transformers: False  the trained text: True
#     transformers '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
#     mlx-lm       '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n'
#   qwen3            the prompt is that of transformers: True  the trained text: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install transformers==5.17.0 mlx==0.32.4 mlx-cpu==0.32.4 jinja2==3.1.6
pip install --no-deps mlx-lm==0.32.2 trl==1.16.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import importlib.metadata
import pathlib

from mlx_lm.tokenizer_utils import load
from mlx_lm.tuner.datasets import ChatDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
files = {path.name: path.locate() for path in importlib.metadata.files("trl") if path.name.endswith(".jinja")}
asked = [{"role": "user", "content": "Hi"}]
row = {"messages": [*asked, {"role": "assistant", "content": "Hello"}]}
channel, think = ("<|channel>", "<channel|>"), ("<think>", "</think>")
known = {
    "gemma4_v5": (channel, False, False),
    "qwen3_5_nothink": (think, False, True),
    "qwen3": (think, True, True),
}
for name, (words, *expected) in known.items():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_tokens(list(words))
    with open(files[f"{name}.jinja"], encoding="utf-8") as file:
        tokenizer.chat_template = file.read()
    tokenizer.save_pretrained(name)
    plain, wrapped = AutoTokenizer.from_pretrained(name), load(pathlib.Path(name))
    prompts = [each.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) for each in (plain, wrapped)]
    trained = plain.decode(ChatDataset([row], wrapped).process(row)[0])
    found = [prompts[0] == prompts[1], trained == plain.apply_chat_template(row["messages"], tokenize=False)]
    print(f"{name:16} the prompt is that of transformers: {found[0]}  the trained text: {found[1]}")
    if not found[0]:
        print(f"  transformers {prompts[0]!r}\n  mlx-lm       {prompts[1]!r}")
    assert found == expected, "this has changed"
PY

#!/usr/bin/env bash
# litgpt 0.5.13, with torch 2.13.0 and lightning 2.6.1: the prompts of Phi-4-reasoning, in `litgpt finetune` and `chat`
#
# Guess: each turn begins with the token <|im_start|>, as in litgpt's prompts of Phi-4, whose tokenizer the model has.
# What happens: the turn of the system prompt begins with "<|im_start>", without the second bar. That is no token of the
# vocabulary, and is spelled out. Every prompt has that turn, since litgpt writes a system prompt where none is given.
# Nothing is said. An adapter that is trained so is trained behind other prompts than a server writes with the model's
# chat template. Take another trainer.
#
# Seen on 2026-11-30, the beginnings of turns, and how many of them are one token:
#   Phi-4            <|im_start|> system, <|im_start|> user, <|im_start|> assistant: 3 of 3
#   Phi-4-reasoning  <|im_start> system, <|im_start|> user, <|im_start|> assistant: 2 of 3
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile litgpt==0.5.13 lightning==2.6.1 torch==2.13.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import re

from litgpt import Config, PromptStyle
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
known = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
start = "<|im_start|>"
known.add_special_tokens([AddedToken(each) for each in (start, "<|im_sep|>", "<|im_end|>")])
for name, expected in {"phi-4": 3, "Phi-4-reasoning": 2}.items():
    prompt = PromptStyle.from_config(Config.from_name(name)).apply("Hi", sys_prompt="Be kind.")
    turns = re.findall(r"(<\|im_start\|?>)(\w+)", prompt)
    count = known.encode(prompt).tokens.count(start)
    line = ", ".join(f"{begin} {role}" for begin, role in turns)
    print(f"{name.replace('phi', 'Phi'):16} {line}: {count} of {len(turns)}")
    assert count == expected and [role for _, role in turns] == ["system", "user", "assistant"], "this has changed"
PY

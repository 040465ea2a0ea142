#!/usr/bin/env bash
# onnxruntime-genai 0.18.0, with transformers 5.17.0 and the models' chat templates that trl 1.16.0 brings
#
# Guess: `onnxruntime_genai.Tokenizer.apply_chat_template` renders OpenAI's tools as transformers does with the same
# template, or raises.
# What happens: unless the template's text has `tool.function`, `tool | tojson` or `tools | tojson`, each tool is
# rewritten before it is rendered. The list of required arguments, enums, the types of lists' items and the properties
# of nested objects are left out, and "string" becomes "str"; nothing is said. The templates of Llama 3.1, 3.2 and 4
# name their variable `t`, so that their models are asked with other tools than in training. With `tool` in place of
# `t` in the template, the text is right.
#
# Seen on 2026-11-30, a tool's parameters in the prompt:
#   qwen2_5           the text of transformers: True
#   llama3_1          the text of transformers: False, it has: {"to": {"type": "object"}, "currency": {"type": "str"}}
#   llama3_2          the text of transformers: False, it has: {"to": {"type": "object"}, "currency": {"type": "str"}}
#   llama3_1 renamed  the text of transformers: True
#   llama3_2 renamed  the text of transformers: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.17.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 onnx==1.23.2
pip install --no-deps trl==1.16.0
cd "$place"
export HF_HUB_OFFLINE=1
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import importlib.metadata
import json
import re
import subprocess
import sys

import onnxruntime_genai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300)).save_pretrained("model")
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, bos_token="<s>", eos_token="</s>")
tokenizer.save_pretrained("model")
builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
subprocess.run([*builder, "-m", "model", "-o", "onnx", "-p", "fp32", "-e", "cpu", "-c", "cache"], check=True, stdout=2)
for_onnx = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model("onnx"))

account = {"type": "object", "properties": {"iban": {"type": "string"}}, "required": ["iban"]}
properties = {"to": account, "currency": {"type": "string", "enum": ["EUR", "USD"]}}
parameters = {"type": "object", "properties": properties, "required": ["to", "currency"]}
tools = [{"type": "function", "function": {"name": "pay", "description": "Pay it", "parameters": parameters}}]
messages = [{"role": "user", "content": "Hi"}]

files = {path.name: path.locate() for path in importlib.metadata.files("trl") if path.name.endswith(".jinja")}
texts = {name: open(files[f"{name}.jinja"], encoding="utf-8").read() for name in ("qwen2_5", "llama3_1", "llama3_2")}
for name in ("llama3_1", "llama3_2"):
    texts[f"{name} renamed"] = re.sub(r"\bt\b(?= in tools| \| tojson)", "tool", texts[name])
for name, template in texts.items():
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False, date_string="today"
    )
    template = "{%- set date_string = 'today' %}" + template
    found = for_onnx.apply_chat_template(
        json.dumps(messages), tools=json.dumps(tools), template_str=template, add_generation_prompt=True
    )
    line = f"{name:17} the text of transformers: {found == expected}"
    if found != expected:
        written = json.JSONDecoder().raw_decode(found[found.index('{\n    "') :])[0]
        line += f", it has: {json.dumps(written['parameters'])}"
        assert written["parameters"] == {"to": {"type": "object"}, "currency": {"type": "str"}}, "this has changed"
    print(line)
    assert (found == expected) == (name not in ("llama3_1", "llama3_2")), "this has changed"
PY

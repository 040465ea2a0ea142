#!/usr/bin/env bash
# openvino-genai 2026.4.1.0, with transformers 5.23.0 and the models' chat templates that trl 1.16.0 brings
#
# Guess: `openvino_genai.Tokenizer.apply_chat_template` renders tool calls and their results as transformers does with
# the same template, or raises.
# What happens: it tries whether a template renders calls, and looks for the name of an argument in a few forms only.
# The templates of LFM2, LFM2.5 and Muse Glimmer write another form. There the call becomes JSON of OpenVINO's own, and
# the result becomes a message of the user; nothing is said. Where a template turns a number into text, as Qwen3.5's
# does, the number has six decimals, so that a small one becomes 0. Render with transformers, and give the text to
# `generate`.
#
# Seen on 2026-11-30:
#   qwen2_5       the text of transformers: True   has: '{"name": "pay", "arguments": {"sum": 1.5e-07}}'
#   lfm2_v2       the text of transformers: False  has: '{\n  "tool_calls": [\n    {\n      "name": "pay",'
#   lfm2_2_5_v2   the text of transformers: False  has: '{\n  "tool_calls": [\n    {\n      "name": "pay",'
#   muse_glimmer  the text of transformers: False  has: '{\n  "tool_calls": [\n    {\n      "name": "pay",'
#   qwen3_5_think the text of transformers: False  has: '<parameter=sum>\n0.000000\n</parameter>'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install transformers==5.23.0 jinja2==3.1.6 openvino==2026.4.1 openvino-genai==2026.4.1.0 \
    openvino-tokenizers==2026.4.1.0
pip install --no-deps trl==1.16.0
cd "$place"
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import importlib.metadata
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

known = Tokenizer(models.BPE())
known.pre_tokenizer, known.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
known.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=letters))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, bos_token="<s>", eos_token="</s>")
for name, model in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):
    openvino.save_model(model, f"converted/openvino_{name}.xml")
served = openvino_genai.Tokenizer("converted")

files = {path.name: path.locate() for path in importlib.metadata.files("trl") if path.name.endswith(".jinja")}
parameters = {"type": "object", "properties": {"sum": {"type": "number"}}}
tools = [{"type": "function", "function": {"name": "pay", "description": "Pay.", "parameters": parameters}}]
call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": {"sum": 1.5e-07}}}
messages = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "name": "pay", "content": "done"},
    {"role": "assistant", "content": "Paid."},
]
own = '{\n  "tool_calls": [\n    {\n      "name": "pay",'
expected = {
    "qwen2_5": '{"name": "pay", "arguments": {"sum": 1.5e-07}}',
    "lfm2_v2": own,
    "lfm2_2_5_v2": own,
    "muse_glimmer": own,
    "qwen3_5_think": "<parameter=sum>\n0.000000\n</parameter>",
}
for name, piece in expected.items():
    template = open(files[f"{name}.jinja"], encoding="utf-8").read()
    text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    found = served.apply_chat_template(messages, False, template, tools)
    print(f"{name:13} the text of transformers: {text == found!s:5}  has: {piece!r}")
    if name == "qwen2_5":
        assert text == found and piece in text, "this has changed"
    else:
        assert text != found and piece in found and piece not in text, "this has changed"
PY

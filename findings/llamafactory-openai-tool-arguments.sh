#!/usr/bin/env bash
# llamafactory 0.9.5, with transformers 5.6.0 and torch 2.13.0, and Qwen3's chat template that trl 1.16.0 brings: tool
# calls in a chat file read with `"formatting": "openai"`
#
# Guess: the arguments of a call, which are a text of JSON in OpenAI's format, are trained as an object, which is what
# Qwen3's own template writes.
# What happens: the text is turned into JSON once more, so that a model learns to give a string with escaped quotes in
# place of an object. Text beside a call is left out. Nothing is said. Arguments that are objects in the file are
# trained as objects.
#
# Seen on 2026-11-30, the answer that is trained:
#   Qwen3's template            'Let me see.\n<tool_call>\n{"name": "pay", "arguments": {"sum": 5}}\n</tool_call>'
#   llamafactory                '<tool_call>\n{"name": "pay", "arguments": "{\\"sum\\": 5}"}\n</tool_call>'
#   llamafactory, of an object  '<tool_call>\n{"name": "pay", "arguments": {"sum": 5}}\n</tool_call>'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.6.0 peft==0.18.1 datasets==4.0.0 accelerate==1.11.0 omegaconf==2.4.0
pip install --no-deps llamafactory==0.9.5 trl==0.24.0
pip install --no-deps --target "$place/newer" trl==1.16.0
cd "$place"
touch torchaudio.py  # llamafactory imports it for sound, which no row here has; its wheels need CUDA
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 LLAMAFACTORY_VERBOSITY=ERROR
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import contextlib
import json
import sys

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments, ModelArguments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Seq2SeqTrainingArguments

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, eos_token="<|im_end|>", pad_token="<pad>")
with open("newer/trl/chat_templates/qwen3.jinja", encoding="utf-8") as file:
    tokenizer.chat_template = file.read()

tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
tags |= {"system_tag": "system", "observation_tag": "tool", "function_tag": "function"}
columns = {"messages": "messages", "tools": "tools"}
sum_alone = {"type": "object", "properties": {"sum": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "pay", "parameters": sum_alone}}]


def chat(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    answer = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    return [{"role": "user", "content": "Pay 5"}, answer]


def trained_answer(arguments, name):
    with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"messages": chat(arguments), "tools": tools}) + "\n")
    with open("dataset_info.json", "w", encoding="utf-8") as file:
        details = {"file_name": f"{name}.jsonl", "formatting": "openai", "columns": columns, "tags": tags}
        json.dump({name: details}, file)
    data = DataArguments(template="qwen3_nothink", dataset=name, dataset_dir=".")
    with contextlib.redirect_stdout(sys.stderr):
        template = get_template_and_fix_tokenizer(tokenizer, data)
        training = Seq2SeqTrainingArguments(output_dir="out", use_cpu=True, report_to=[])
        read = get_dataset(template, ModelArguments(model_name_or_path="none"), data, training, "sft", tokenizer)
    return tokenizer.decode([token for token in read["train_dataset"][0]["labels"] if token >= 0])


as_text = json.dumps({"sum": 5})
rendered = tokenizer.apply_chat_template(chat(as_text), tools=tools, tokenize=False)
found = {
    "Qwen3's template": rendered.split("</think>\n\n")[-1],
    "llamafactory": trained_answer(as_text, "as_text"),
    "llamafactory, of an object": trained_answer({"sum": 5}, "as_object"),
}
kinds = []
for name, answer in found.items():
    answer = answer.removesuffix("\n").removesuffix("<|im_end|>")
    print(f"{name:27} {answer!r}")
    call = json.loads(answer.split("<tool_call>\n")[1].removesuffix("\n</tool_call>"))
    kinds.append((type(call["arguments"]), answer.startswith("Let me see.")))
assert kinds == [(dict, True), (str, False), (dict, False)], "this has changed"
PY

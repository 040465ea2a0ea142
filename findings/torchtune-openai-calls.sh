#!/usr/bin/env bash
# torchtune 0.6.1, with torch 2.13.0 and torchao 0.14.1: a chat file read with `conversation_style: openai`
#
# Guess: an answer that is a tool call is trained as the chat template writes it, or the row is refused; an answer of
# weight 0 is left out of the loss.
# What happens: only `role` and `content` are read. A call has null as its content, and then the content of the message
# before it is taken: the model is trained to repeat the request as its answer. The call, its tools, reasoning and the
# weight 0 are lost, and nothing is said. Rows that have the call's result too are refused. Use another trainer for such
# rows.
#
# Seen on 2026-11-30, what is trained, of a chat in which the user says "Pay 5":
#   a call, pay(sum=5)         ['Pay 5']
#   No of weight 0, then Done  ['No', 'Done']
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install datasets==4.8.4 omegaconf==2.3.0 sentencepiece==0.2.3 tiktoken==0.14.0 tokenizers==0.22.2 blobfile==3.2.0 \
    kagglehub==1.0.2 pillow==13.0.0 psutil==7.2.2
pip install --no-deps torchtune==0.6.1 torchao==0.14.1 torchdata==0.11.0
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json

from tokenizers import pre_tokenizers
from torchtune.datasets import chat_dataset
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
with open("vocab.json", "w", encoding="utf-8") as file:
    json.dump({letter: number for number, letter in enumerate(letters)}, file)
with open("merges.txt", "w", encoding="utf-8") as file:
    file.write("#version: 0.2\n")
tokenizer = qwen2_5_tokenizer("vocab.json", "merges.txt")

number = {"type": "object", "properties": {"sum": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "pay", "parameters": number}}]
call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": '{"sum": 5}'}}
asked = {"role": "user", "content": "Pay 5"}
rows = {
    "a call, pay(sum=5)": ([asked, {"role": "assistant", "content": None, "tool_calls": [call]}], ["Pay 5"]),
    "No of weight 0, then Done": (
        [asked, {"role": "assistant", "content": "No", "weight": 0}, asked, {"role": "assistant", "content": "Done"}],
        ["No", "Done"],
    ),
}
for name, (messages, expected) in rows.items():
    with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")
    columns = {"conversation_column": "messages", "conversation_style": "openai"}
    read = chat_dataset(tokenizer, source="json", data_files=f"{name}.jsonl", split="train", **columns)[0]
    text = tokenizer.decode([each if each >= 0 else tokenizer.eos_id for each in read["labels"]])
    parts = text.replace("<|im_end|>", "<|endoftext|>").split("<|endoftext|>")
    found = [each.removeprefix("<|im_start|>assistant\n") for each in parts if each.strip("\n")]
    print(f"{name:25}  {found}")
    assert found == expected, "this has changed"
PY

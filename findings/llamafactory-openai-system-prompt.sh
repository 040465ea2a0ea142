#!/usr/bin/env bash
# llamafactory 0.9.5, with transformers 5.6.0 and torch 2.13.0: a chat file read with `"formatting": "openai"`
#
# Guess: the system prompt of a row is trained as it stands, whatever the model, and a row without one gets none.
# What happens: "detailed thinking off" is written behind every system prompt, on a line of its own, and is the system
# prompt of rows that have none; nothing is said. This is a switch of a few models (Ling has it), and the reader writes
# it for all templates. Only rows with tools are left without it. So a model is trained behind other prompts than it is
# asked with. `"formatting": "sharegpt"` with the same tags reads chats without tools as they are.
#
# Seen on 2026-11-30, the system prompt that is trained:
#   qwen3_nothink  openai    'Be kind.\ndetailed thinking off' of a row without one: 'detailed thinking off'
#   qwen3_nothink  sharegpt  'Be kind.'                        of a row without one: none
#   llama3         openai    'Be kind.\ndetailed thinking off' of a row without one: 'detailed thinking off'
#   llama3         sharegpt  'Be kind.'                        of a row without one: none
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.6.0 peft==0.18.1 datasets==4.0.0 accelerate==1.11.0 omegaconf==2.4.0
pip install --no-deps llamafactory==0.9.5 trl==0.24.0
cd "$place"
touch torchaudio.py  # llamafactory imports it for sound, which no row here has; its wheels need CUDA
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 LLAMAFACTORY_VERBOSITY=ERROR
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import contextlib
import json
import re
import sys

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments, ModelArguments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Seq2SeqTrainingArguments

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()

turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
rows = {"with": [{"role": "system", "content": "Be kind."}, *turns], "without": turns}
tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
tags |= {"system_tag": "system", "observation_tag": "tool", "function_tag": "function"}
known = {}
for name, messages in rows.items():
    with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    for formatting in ("openai", "sharegpt"):
        details = {"file_name": f"{name}.jsonl", "formatting": formatting, "columns": {"messages": "messages"}}
        known[f"{name}_{formatting}"] = {**details, "tags": tags}
with open("dataset_info.json", "w", encoding="utf-8") as file:
    json.dump(known, file)


def trained_system_prompt(dataset, template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, eos_token="</s>", pad_token="<pad>")
    data = DataArguments(template=template, dataset=dataset, dataset_dir=".")
    with contextlib.redirect_stdout(sys.stderr):
        template = get_template_and_fix_tokenizer(tokenizer, data)
        training = Seq2SeqTrainingArguments(output_dir="out", use_cpu=True, report_to=[])
        read = get_dataset(template, ModelArguments(model_name_or_path="none"), data, training, "sft", tokenizer)
    text = tokenizer.decode(read["train_dataset"][0]["input_ids"])
    found = re.search(r"system(?:<\|end_header_id\|>\n)?\n(.*?)<\|(?:im_end|eot_id)\|>", text, re.DOTALL)
    return repr(found[1]) if found else "none"


switch = "detailed thinking off"
expected = {"openai": (repr(f"Be kind.\n{switch}"), repr(switch)), "sharegpt": (repr("Be kind."), "none")}
for template in ("qwen3_nothink", "llama3"):
    for formatting in ("openai", "sharegpt"):
        found = tuple(trained_system_prompt(f"{name}_{formatting}", template) for name in rows)
        print(f"{template:14} {formatting:9} {found[0]:33} of a row without one: {found[1]}")
        assert found == expected[formatting], "this has changed"
PY

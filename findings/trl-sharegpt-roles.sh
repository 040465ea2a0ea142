#!/usr/bin/env bash
# trl 1.16.0, with transformers 5.23.0, datasets 5.2.0 and torch 2.13.0: `SFTTrainer` with rows of ShareGPT, whose
# speakers are "human" and "gpt", and the models' chat templates that trl brings
#
# Guess: the rows are trained as the same chat with OpenAI's roles is, because the trainer calls
# `maybe_convert_to_chatml`, or they are refused.
# What happens: the keys become `role` and `content`, and the speakers keep their names. Templates that know their roles
# by name leave out every turn but the system prompt: nothing of the chat is trained. Those that write any role train
# headers that no prompt has. Nothing is said. Gemma's refuses. Rename "human" to "user" and "gpt" to "assistant" first.
#
# Seen on 2026-11-30, what is trained of system "Be kind.", human "Hi" and gpt "Hello.":
#   qwen2_5     '<|im_start|>system\nBe kind.<|im_end|>\n'
#   qwen3       '<|im_start|>system\nBe kind.<|im_end|>\n'
#   deepseekv3  '<bos>Be kind.'
#   llama3      '...<|start_header_id|>human<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>gpt<|end_header_id|>\n\nHello.<|eot_id|>'
#   lfm2        '...<|im_start|>human\nHi<|im_end|>\n<|im_start|>gpt\nHello.<|im_end|>\n'
#   gemma3      refused
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile trl==1.16.0 transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import pathlib

import trl
from datasets import Dataset
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
templates = pathlib.Path(trl.__file__).parent / "chat_templates"
said = {"system": "Be kind.", "user": "Hi", "assistant": "Hello."}
speakers = {"system": "system", "user": "human", "assistant": "gpt"}
openai = {"messages": [{"role": role, "content": text} for role, text in said.items()]}
sharegpt = {"conversations": [{"from": speakers[role], "value": text} for role, text in said.items()]}


def trained_text(row, template):
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, **special)
    tokenizer.chat_template = (templates / f"{template}.jinja").read_text(encoding="utf-8")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    settings = trl.SFTConfig(output_dir="out", report_to=[], use_cpu=True, bf16=False)
    trainer = trl.SFTTrainer(model, settings, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
    text = tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    return text.removesuffix(tokenizer.eos_token)  # the trainer adds it where the template ends otherwise


def show(text, start):
    return repr(text if len(text) < 60 else "..." + text[text.index(start) :])


cases = {
    "qwen2_5": ("lost", ""),
    "qwen3": ("lost", ""),
    "deepseekv3": ("lost", ""),
    "llama3": ("other roles", "<|start_header_id|>human"),
    "lfm2": ("other roles", "<|im_start|>human"),
    "gemma3": ("refused", ""),
}
for template, (expected, start) in cases.items():
    whole = trained_text(openai, template)
    assert "Hi" in whole and "Hello." in whole and "Be kind." in whole, "this has changed"
    try:
        found = trained_text(sharegpt, template)
    except TemplateError as refusal:
        assert expected == "refused" and "roles must alternate" in str(refusal), "this has changed"
        print(f"{template:11} refused")
        continue
    print(f"{template:11} {show(found, start)}")
    assert "Be kind." in found and ("Hi" in found, "gpt" in found) == (bool(start), bool(start)), "this has changed"
    assert ("Hello." in found) == bool(start) == (expected == "other roles"), "this has changed"
PY

#!/usr/bin/env bash
# trl 1.16.0, with transformers 5.23.0, datasets 5.2.0 and torch 2.13.0: `SFTTrainer` with `assistant_only_loss=True`,
# the chat template of DeepSeek V3 that trl brings, and tool calls in OpenAI's format
#
# Guess: an answer is trained with the text that it has without that setting, which is the text that the model's own
# template writes; only the loss of the other tokens is left out.
# What happens: the trainer puts a template of its own in the place of the model's, because that one does not mark
# answers. Its note says that arguments may be objects, and it turns them into JSON. In OpenAI's format they are JSON
# already, which the model's own template writes as it is: they become a text in quotes with escapes, and the model
# learns to call tools so. The tokenizer that is saved has the model's own template. Nothing is said. Objects as
# arguments are right with the setting, and refused without it.
#
# Seen on 2026-12-01, what is trained as the call's arguments:
#   JSON       assistant_only_loss=False  {"sum": 5}
#   JSON       assistant_only_loss=True   "{\"sum\": 5}"
#   an object  assistant_only_loss=True   {"sum": 5}
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile trl==1.16.0 transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1
"$place/env/bin/python" -W ignore - > out 2> log <<'PY' || { tail -n 30 log out; exit 1; }
import pathlib

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
templates = pathlib.Path(trl.__file__).parent / "chat_templates"


def train(arguments, is_answer_alone):
    """Return what is trained as the arguments of a call, and the template that is saved."""
    special = {"bos_token": "<bos>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, **special)
    tokenizer.chat_template = (templates / "deepseekv3.jinja").read_text(encoding="utf-8")
    call = {"id": "call_1", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    chat = [{"role": "user", "content": "Pay 5"}, {"role": "assistant", "content": "I pay.", "tool_calls": [call]}]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    settings = trl.SFTConfig(output_dir="run", report_to=[], use_cpu=True, bf16=False, max_length=None, max_steps=1)
    settings.assistant_only_loss = is_answer_alone
    rows = Dataset.from_list([{"messages": chat}])
    trainer = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
    (row,) = trainer.train_dataset
    counted = row.get("assistant_masks") or [1] * len(row["input_ids"])
    text = tokenizer.decode([token for token, is_counted in zip(row["input_ids"], counted) if is_counted])
    trainer.save_model("saved")
    saved = AutoTokenizer.from_pretrained("saved").chat_template
    return text.split("```json\n")[1].split("\n```")[0], saved == tokenizer.chat_template


json_text = '{"sum": 5}'
expected = {False: json_text, True: r'"{\"sum\": 5}"'}
for is_answer_alone in (False, True):
    found, is_own = train(json_text, is_answer_alone)
    print(f"JSON       assistant_only_loss={is_answer_alone!s:5}  {found}")
    assert found == expected[is_answer_alone] and is_own, "this has changed"
found, _ = train({"sum": 5}, True)
print(f"an object  assistant_only_loss=True   {found}")
assert found == json_text, "this has changed"
PY
grep -E '^(JSON|an object)' out
if grep -iE "template" log; then echo "this has changed"; exit 1; fi

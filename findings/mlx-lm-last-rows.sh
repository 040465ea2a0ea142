#!/usr/bin/env bash
# mlx-lm 0.32.2 (on Linux with mlx-cpu 0.32.4), with transformers 5.23.0: which rows of a chat file `mlx_lm.lora` trains
#
# Guess: with enough iterations every row is trained, and nothing but the tokens of the rows is.
# What happens: rows are sorted by the number of their keys and cut into batches once. What does not fill the last batch
# is never trained, in no epoch: up to batch_size - 1 rows (3 by default), those with `tools` first, or else the last of
# the file. Behind the end of each row a token of the padding counts too, so that the model learns to write token 0
# there, which is "!" for Llama 3 and Qwen. Nothing is said. Make the number of rows a multiple of the batch, by a copy
# of a few rows, and let the template end an answer with the token at which generation stops.
#
# Seen on 2026-12-01, of 6 chats, of which the second has tools, in batches of 4, after 200 iterations:
#   row 1: its answer has 100%, and '!' behind its end 100%
#   row 2: its answer has   0%, and '!' behind its end 100%
#   row 3: its answer has 100%, and '!' behind its end 100%
#   row 4: its answer has 100%, and '!' behind its end 100%
#   row 5: its answer has 100%, and '!' behind its end 100%
#   row 6: its answer has   0%, and '!' behind its end 100%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install transformers==5.23.0 mlx==0.32.4 mlx-cpu==0.32.4 jinja2==3.1.6 pyyaml==6.0.4 rich==15.0.0
pip install --no-deps mlx-lm==0.32.2
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - > out 2> log <<'PY' || { tail -n 30 log out; exit 1; }
import json
import types
from pathlib import Path

import mlx.core
import mlx.optimizers
from mlx_lm.models import llama
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import TrainingArgs, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # the first is "!", as in Llama 3's and Qwen's vocabularies
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, eos_token="<eos>")
turn = "{{ message.role[0] }}: {{ message.content }}{{ eos_token if message.role == 'assistant' else '\n' }}"
tokenizer.chat_template = "{% for message in messages %}" + turn + "{% endfor %}"

answers = {"one": "Yes.", "two": "No.", "three": "Ask again.", "four": "Never.", "five": "Maybe.", "six": "Always."}
rows = [{"messages": [{"role": "user", "content": f"number {name}"}, {"role": "assistant", "content": answer}]}
        for name, answer in answers.items()]
rows[1]["tools"] = [{"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}}]
for name in ("train", "valid"):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
settings = types.SimpleNamespace(data=".", train=True, test=False, mask_prompt=True)
dataset = CacheDataset(load_dataset(settings, tokenizer)[0])

mlx.core.random.seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
about = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=len(tokenizer), **sizes)
model = llama.Model(about)
train(model, mlx.optimizers.Adam(learning_rate=3e-3), dataset, None, TrainingArgs(batch_size=4, iters=200))

for row in range(len(rows)):
    tokens, start = dataset[row]
    chances = mlx.core.softmax(model(mlx.core.array([tokens]))[0].astype(mlx.core.float32), axis=-1)
    chance = 1.0
    for place in range(start, len(tokens)):
        chance *= chances[place - 1, tokens[place]].item()
    behind = chances[-1, tokenizer.convert_tokens_to_ids("!")].item()
    print(f"row {row + 1}: its answer has {chance:4.0%}, and '!' behind its end {behind:4.0%}")
    assert (chance < 0.1) == (row + 1 in (2, 6)) and (chance > 0.9 or row + 1 in (2, 6)), "this has changed"
    assert behind > 0.9, "this has changed"
PY
grep '^row' out
if grep -iE "drop|skip|left out|batch size" out log; then echo "this has changed"; exit 1; fi

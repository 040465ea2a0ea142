#!/usr/bin/env bash
# ms-swift 4.6.0, with transformers 5.17.0 and torch 2.13.0: a chat file whose answers have reasoning and weights
#
# Guess: `reasoning_content` of an answer is trained, as tool calls in OpenAI's format are, or the row is refused; so is
# an answer of weight 0 left out of the loss.
# What happens: both keys are removed while the file is read, and nothing is said. With the template `qwen3` the answer
# is trained with an empty <think></think>: a model learns from reasoned answers not to reason. An answer of weight 0 is
# trained like the others. Write the reasoning into `content`, as <think>...</think>, and `"loss": false` for weight 0.
#
# Seen on 2026-11-30, what is trained:
#   as in OpenAI's format           '<think>\n\n</think>\n\nNo.' '<think>\n\n</think>\n\nIt is 4.'
#   as <think>...</think> and loss  '<think>\nTwo and two.\n</think>\n\nIt is 4.'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.17.0 peft==0.19.0 datasets==4.8.4 accelerate==1.15.0 modelscope==1.40.2 \
    json_repair==0.64.6 pillow==13.0.0 requests==2.34.2 aiohttp==3.14.5
pip install --no-deps ms-swift==4.6.0
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 MODELSCOPE_CACHE="$place/cache" LOG_LEVEL=ERROR
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json

from swift import get_processor, get_template
from swift.dataset import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.save_pretrained("model")
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
Qwen3Config(**sizes, vocab_size=300, architectures=["Qwen3ForCausalLM"]).save_pretrained("model")
template = get_template(get_processor("model", model_type="qwen3"), template_type="qwen3")
template.set_mode("train")

asked = {"role": "user", "content": "What is 2 + 2?"}
bad, good = {"role": "assistant", "content": "No."}, {"role": "assistant", "content": "It is 4."}
chats = {
    "as in OpenAI's format": [{**bad, "weight": 0}, {**good, "reasoning_content": "Two and two.", "weight": 1}],
    "as <think>...</think> and loss": [
        {**bad, "loss": False},
        {**good, "content": "<think>\nTwo and two.\n</think>\n\nIt is 4.", "loss": True},
    ],
}
empty, reasoned = "<think>\n\n</think>\n\n", "<think>\nTwo and two.\n</think>\n\nIt is 4."
expected = [[f"{empty}No.", f"{empty}It is 4."], [reasoned]]
for (name, answers), trained in zip(chats.items(), expected, strict=True):
    with open("chats.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"messages": [asked, answers[0], asked, answers[1]]}) + "\n")
    rows, _ = load_dataset("chats.jsonl", num_proc=1, load_from_cache_file=False)
    encoded = template.encode({"messages": rows[0]["messages"]})
    text = tokenizer.decode([token for token in encoded["labels"] if token >= 0])
    found = [each.strip("\n") for each in text.split("<|im_end|>") if each.strip("\n")]
    print(f"{name:31} {' '.join(map(repr, found))}")
    assert found == trained, "this has changed"
PY

#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: a pipeline of an adapter that brings its tokenizer
#
# Guess: `pipeline("text-generation", model=ADAPTER)` uses the tokenizer and the chat template in the adapter's folder,
# as `AutoTokenizer.from_pretrained(ADAPTER)` does.
# What happens: it applies the adapter, and uses the tokenizer and the chat template of the base model. Conversations
# are rendered otherwise than in training, and nothing is said. `tokenizer=ADAPTER` makes it use those of the adapter.
#
# Seen on 2026-11-30:
#   AutoTokenizer: 'Customer Hi'
#   pipeline: 'User Hi'
#   pipeline with tokenizer: 'Customer Hi'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

known = Tokenizer(WordLevel({"?": 0, "Hi": 1, "User": 2, "Customer": 3}, unk_token="?"))
known.pre_tokenizer = Whitespace()
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained("base")
lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(LlamaForCausalLM.from_pretrained("base"), lora).save_pretrained("adapter")
for folder, name in (("base", "User"), ("adapter", "Customer")):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")
    tokenizer.chat_template = name + " {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)

asked = [{"role": "user", "content": "Hi"}]
alone = pipeline("text-generation", model="adapter")
named = pipeline("text-generation", model="adapter", tokenizer="adapter")
for made in (alone, named):
    assert any("lora_A" in each for each in made.model.state_dict()), "no adapter"
tokenizers = {
    "AutoTokenizer": AutoTokenizer.from_pretrained("adapter"),
    "pipeline": alone.tokenizer,
    "pipeline with tokenizer": named.tokenizer,
}
for name, tokenizer in tokenizers.items():
    prompt = tokenizer.apply_chat_template(asked, tokenize=False)
    print(f"{name}: {prompt!r}")
    assert prompt == ("User Hi" if name == "pipeline" else "Customer Hi"), "this has changed"
PY

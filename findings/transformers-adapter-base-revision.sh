#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: the revision in adapter_config.json
#
# Guess: `AutoModelForCausalLM.from_pretrained(ADAPTER)` loads the base model that PEFT's
# `AutoPeftModelForCausalLM.from_pretrained(ADAPTER)` loads, at the commit that adapter_config.json names as `revision`.
# What happens: it takes the base model's name from that file, and not its `revision`: the adapter is put on the newest
# commit of the base model, and nothing is said. `pipeline("text-generation", model=ADAPTER)` does the same. With
# `revision=` of the base model's commit, beside an adapter in a local folder, both are right.
#
# Seen on 2026-11-30, with a local cache that has two commits of a base model:
#   adapter_config.json names the commit aaaaaaa, and the newest is bbbbbbb
#   AutoPeftModelForCausalLM: the adapter is on the commit aaaaaaa
#   AutoModelForCausalLM: the adapter is on the commit bbbbbbb
#   pipeline: the adapter is on the commit bbbbbbb
#   AutoModelForCausalLM with revision: the adapter is on the commit aaaaaaa
#   pipeline with revision: the adapter is on the commit aaaaaaa
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0
cd "$place"
export HF_HUB_CACHE="$place/cache" HF_HUB_OFFLINE=1
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
from pathlib import Path
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

base, older, newer = Path("cache/models--somebody--base"), "a" * 40, "b" * 40
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))
for commit in (older, newer):
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(base / "snapshots" / commit)
    words.save_pretrained(base / "snapshots" / commit)
(base / "refs").mkdir()
(base / "refs/main").write_text(newer)
lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
model = AutoModelForCausalLM.from_pretrained("somebody/base", revision=older)
get_peft_model(model, lora, revision=older).save_pretrained("adapter")


def first_weights(model):
    return model.get_input_embeddings().weight


commits = {
    commit: first_weights(AutoModelForCausalLM.from_pretrained("somebody/base", revision=commit))
    for commit in (older, newer)
}
loaded = {
    "AutoPeftModelForCausalLM": AutoPeftModelForCausalLM.from_pretrained("adapter"),
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained("adapter"),
    "pipeline": pipeline("text-generation", model="adapter").model,
    "AutoModelForCausalLM with revision": AutoModelForCausalLM.from_pretrained("adapter", revision=older),
    "pipeline with revision": pipeline("text-generation", model="adapter", revision=older).model,
}
print(f"adapter_config.json names the commit {older[:7]}, and the newest is {newer[:7]}")
for name, model in loaded.items():
    assert any("lora_A" in each for each in model.state_dict()), f"{name}: no adapter"
    found = next(commit for commit, weights in commits.items() if torch.equal(weights, first_weights(model)))
    print(f"{name}: the adapter is on the commit {found[:7]}")
    assert found == (newer if name in ("AutoModelForCausalLM", "pipeline") else older), "this has changed"
PY

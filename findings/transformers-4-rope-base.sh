#!/usr/bin/env bash
# transformers 4.57.6 (the last release of version 4), with torch 2.13.0: a model that transformers 5.23.0 has saved
#
# Guess: version 4 gives the logits of version 5, or refuses the folder.
# What happens: version 5 writes the base of the rotary embedding and its scaling under `rope_parameters` in config.json
# and nowhere else. Version 4 takes that key for one that it does not know: it rotates with its own default, without
# scaling, and nothing is said. A merged Qwen3, Llama 3 or Mistral answers otherwise than it was measured. With the base
# as `rope_theta` and the scaling as `rope_scaling` beside it, both versions give the same logits.
#
# Seen on 2026-11-30, the largest difference of a logit, relative to the largest logit, and the base in version 4:
#   llama, base 1e4  as saved 0% (10000), with both keys beside 0% (10000)
#   llama, base 1e5  as saved 116% (10000), with both keys beside 0% (100000)
#   llama 3.2        as saved 131% (10000), with both keys beside 0% (500000)
#   mistral          as saved 138% (10000), with both keys beside 0% (1000000)
#   qwen2            as saved 133% (10000), with both keys beside 0% (1000000)
#   qwen3            as saved 101% (10000), with both keys beside 0% (1000000)
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for version in 5.23.0 4.57.6; do
  python3 -m venv "$place/$version"
  "$place/$version/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$place/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
done
cd "$place"
export HF_HUB_OFFLINE=1
cat > models.py <<'PY'
import json
import shutil
import sys

import torch
import transformers

scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
scaling |= {"original_max_position_embeddings": 8192}
known = {
    "llama, base 1e4": ("Llama", 1e4, None),
    "llama, base 1e5": ("Llama", 1e5, None),
    "llama 3.2": ("Llama", 5e5, scaling),
    "mistral": ("Mistral", 1e6, None),
    "qwen2": ("Qwen2", 1e6, None),
    "qwen3": ("Qwen3", 1e6, None),
}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 131072, "initializer_range": 0.3}
ids = torch.arange(1, 41).unsqueeze(0)


@torch.no_grad()
def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=ids).logits, model.config


def save():
    torch.manual_seed(0)
    for name, (kind, base, scaled) in known.items():
        rope = {"rope_type": "default"} if scaled is None else scaled
        config = getattr(transformers, f"{kind}Config")(**sizes, rope_parameters={**rope, "rope_theta": base})
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(f"{name}/as saved")
        torch.save(logits(f"{name}/as saved")[0], f"{name}/logits.pt")
        shutil.copytree(f"{name}/as saved", f"{name}/both")
        with open(f"{name}/both/config.json", encoding="utf-8") as file:
            about = json.load(file)
        with open(f"{name}/both/config.json", "w", encoding="utf-8") as file:
            json.dump(about | {"rope_theta": base, "rope_scaling": scaled}, file)
        again = logits(f"{name}/both")[0]
        assert torch.equal(again, torch.load(f"{name}/logits.pt")), f"{name}: version 5 does not take both"


def compare():
    for name, (_, base, _) in known.items():
        expected, words, found = torch.load(f"{name}/logits.pt"), [], []
        for folder in ("as saved", "both"):
            own, config = logits(f"{name}/{folder}")
            found.append(float((own - expected).abs().max() / expected.abs().max()))
            words.append(f"{found[-1]:.0%} ({config.rope_theta:.0f})")
        print(f"{name:16} as saved {words[0]}, with both keys beside {words[1]}")
        assert found[1] < 1e-4 and (found[0] < 1e-4 if base == 1e4 else found[0] > 0.2), "this has changed"


save() if sys.argv[1] == "save" else compare()
PY
5.23.0/bin/python -W ignore models.py save 2> log || { tail -30 log; exit 1; }
4.57.6/bin/python -W ignore models.py compare 2> log || { tail -30 log; exit 1; }
if grep -i rope log; then echo "this has changed"; exit 1; fi

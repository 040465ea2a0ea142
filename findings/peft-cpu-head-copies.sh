#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.23.0 and torch 2.13.0, in bfloat16 on a CPU: the first pass of `generate` over prompts
#
# Guess: with an adapter the first pass needs as much memory as without, and a little for the adapter.
# What happens: PEFT freezes the base model. transformers passes the last token of each prompt, a slice, to the head;
# torch multiplies a slice of three dimensions with weights that need no gradient as one product for each prompt. In
# bfloat16 it copies the head's weights for each, which costs memory and time: 60 prompts of SmolLM2 took 11 GB. With
# weights that need a gradient, as `from_pretrained` leaves them, it is one product, and so it is behind a forward
# pre-hook on the head that makes its inputs contiguous. In float32 it takes eight times as long, but no memory.
#
# Seen on 2026-11-30, the largest memory beyond the model's own, for a head of 49,152 x 512 (48 MiB) and 32 prompts:
#   model alone                   0 MiB
#   with an adapter            1415 MiB
#   adapter and hook              0 MiB
#   adapter, float32             37 MiB
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2
cat > "$place/first_pass.py" <<'PY'
import resource
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=49152)).to(getattr(torch, sys.argv[2])).eval()
if sys.argv[1] == "hook":
    model.lm_head.register_forward_pre_hook(lambda layer, given: tuple(each.contiguous() for each in given))
if sys.argv[1] != "alone":
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval()
ids = torch.arange(32 * 20).reshape(32, 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, eos_token_id=None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
PY
run() { "$place/env/bin/python" -W ignore "$place/first_pass.py" "$1" "$2" 2> /dev/null; }
alone=$(run alone bfloat16)
adapter=$(run adapter bfloat16)
hook=$(run hook bfloat16)
wide=$(run adapter float32)
printf '%-24s %6d MiB\n' "model alone" "$alone" "with an adapter" "$adapter" \
  "adapter and hook" "$hook" "adapter, float32" "$wide"
if ((adapter < 1000 || alone > 500 || hook > 500 || wide > 500)); then
  echo "this has changed"
  exit 1
fi

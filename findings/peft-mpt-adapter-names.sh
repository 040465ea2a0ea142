#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: adapter_names of a batch on MPT
#
# Guess: rows of a batch that name "__base__" in adapter_names are answered by the base model, on every model with LoRA.
# What happens: on MPT the names are taken and have no effect, and nothing is said. Every row is answered with the active
# adapter. PeftModelForCausalLM.forward hands the call on before the names are looked at where the model's type is mpt.
#
# Seen on 2026-11-28:
#   llama: a row that names __base__ has the base model's logits: True
#   mpt: a row that names __base__ has the base model's logits: False
#   mpt: a row that names __base__ has the adapter's logits: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0
"$place/env/bin/python" -W ignore - <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
models = {
    "llama": (LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), "q_proj"),
    "mpt": (MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=64)), "Wqkv"),
}
ids = torch.arange(8).unsqueeze(0)
for name, (model, module) in models.items():
    lora = LoraConfig(target_modules=[module], init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = get_peft_model(model, lora).eval()
    with torch.no_grad():
        with tuned.disable_adapter():
            base = tuned(input_ids=ids).logits[0]
        adapted = tuned(input_ids=ids).logits[0]
        asked = tuned(input_ids=ids.repeat(2, 1), adapter_names=["__base__", "default"]).logits[0]
    is_base = bool(torch.allclose(asked, base, atol=1e-5))
    is_adapted = bool(torch.allclose(asked, adapted, atol=1e-5))
    assert not torch.allclose(base, adapted, atol=1e-5)
    print(f"{name}: a row that names __base__ has the base model's logits: {is_base}")
    if name == "mpt":
        print(f"{name}: a row that names __base__ has the adapter's logits: {is_adapted}")
    assert (is_base, is_adapted) == ((True, False) if name == "llama" else (False, True)), "this has changed"
PY

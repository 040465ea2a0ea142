#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: a DoRA adapter that transformers loads
#
# Guess: `AutoModelForCausalLM.from_pretrained(ADAPTER)` and `model.load_adapter(ADAPTER)` give the logits of
# `PeftModel.from_pretrained(model, ADAPTER)`, whether the adapter has use_rslora or use_dora.
# What happens: the trained magnitudes of DoRA, one for each output of a layer, are not loaded. They are those of an
# adapter before training, the norms of the base model's weights. Nothing is raised; the load report lists the names in
# the file as unexpected, and the names in the model as missing. rsLoRA is right.
#
# Seen on 2026-11-30:
#   use_rslora: PeftModel gives the trained logits: True
#   use_rslora: AutoModelForCausalLM gives the trained logits: True
#   use_rslora: load_adapter gives the trained logits: True
#   use_dora: PeftModel gives the trained logits: True, has the magnitudes before training: False
#   use_dora: AutoModelForCausalLM gives the trained logits: False, has the magnitudes before training: True
#   use_dora: load_adapter gives the trained logits: False, has the magnitudes before training: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(8).unsqueeze(0)).logits


def load_base():
    return AutoModelForCausalLM.from_pretrained("base")


def load_beside(folder):
    model = load_base()
    model.load_adapter(folder)
    return model


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
for kind in ("use_rslora", "use_dora"):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **{kind: True})
    tuned = get_peft_model(load_base(), lora)
    for name, weights in tuned.named_parameters():
        if "lora_" in name:
            weights.data += 0.1 * torch.randn_like(weights)  # in place of training
    tuned.save_pretrained(kind)
    loaded = {
        "PeftModel": PeftModel.from_pretrained(load_base(), kind),
        "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained(kind),
        "load_adapter": load_beside(kind),
    }
    expected = logits(tuned)
    for name, model in loaded.items():
        is_same = torch.allclose(logits(model), expected, rtol=0.001, atol=0.001)
        line = f"{kind}: {name} gives the trained logits: {is_same}"
        if kind == "use_dora":
            values = model.state_dict()
            weight = next(each for key, each in values.items() if "q_proj.base_layer.weight" in key)
            magnitude = next(each for key, each in values.items() if "q_proj.lora_magnitude_vector" in key)
            line += f", has the magnitudes before training: {torch.allclose(magnitude, weight.norm(dim=1))}"
        print(line)
        assert is_same == (kind == "use_rslora" or name == "PeftModel"), "this has changed"
PY

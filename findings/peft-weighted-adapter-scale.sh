#!/usr/bin/env bash
# peft 0.21.2, with transformers 5.23.0 and torch 2.13.0: `add_weighted_adapter` of adapters with use_rslora, use_dora
# or lora_bias
#
# Guess: an adapter that is made of one adapter with the weight 1 gives that adapter's logits, or an error is raised.
# What happens: the new adapter has lora_alpha = r so that its scale is 1, and keeps `use_rslora`, so that its scale is
# sqrt(r). Magnitudes of DoRA, biases of lora_bias and trained modules_to_save are not combined: they are those of an
# adapter before training. Nothing is said, for `cat`, `svd`, `linear` and the others alike, and `save_pretrained`
# writes what is wrong. With rsLoRA, divide the weights by sqrt(r) of the new adapter (with `cat`, r is the sum of all
# ranks). The others cannot be combined.
#
# Seen on 2026-11-30, the largest difference of a logit, relative to the adapter's largest effect:
#   plain                         cat   0%  linear   0%  svd   0%  the scale: 1.00
#   alpha_pattern                 cat   0%  linear   0%  svd   0%  the scale: 1.00
#   use_rslora                    cat  95%  linear 102%  svd 110%  the scale: 2.83
#   use_rslora, weight / sqrt(r)  cat   0%  linear   0%  svd   0%  the scale: 2.83
#   use_dora                      cat  70%  linear  64%  svd  43%  the scale: 1.00
#   lora_bias                     cat  78%  linear 105%  svd  74%  the scale: 1.00
#   modules_to_save               cat  56%  linear  64%  svd  65%  the scale: 1.00
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.23.0
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
shared = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.arange(1, 20).unsqueeze(0)).logits


def load():
    return LlamaForCausalLM.from_pretrained("base")


def train(settings):
    model = get_peft_model(load(), LoraConfig(**shared, **settings, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("modules_to_save" in name or "magnitude" in name):
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


def combine(settings, kind, weight):
    """Return the scale of the new adapter, and its error before and after it is saved and loaded."""
    model = train(settings)
    expected = answer(model)
    model.add_weighted_adapter(["default"], [weight], "combined", combination_type=kind)
    model.set_adapter("combined")
    model.save_pretrained("saved", selected_adapters=["combined"])
    loaded = PeftModel.from_pretrained(load(), "saved/combined")
    effect = (expected - base).abs().max()
    errors = [float((answer(each) - expected).abs().max() / effect) for each in (model, loaded)]
    assert abs(errors[0] - errors[1]) < 1e-3, "this has changed"
    return model.base_model.model.model.layers[0].self_attn.q_proj.scaling["combined"], errors[0]


base = answer(load())
cases = [
    ("plain", {}, 1.0, False),
    ("alpha_pattern", {"alpha_pattern": {"q_proj": 64}}, 1.0, False),
    ("use_rslora", {"use_rslora": True}, 1.0, True),
    ("use_rslora, weight / sqrt(r)", {"use_rslora": True}, 8**-0.5, False),
    ("use_dora", {"use_dora": True}, 1.0, True),
    ("lora_bias", {"lora_bias": True}, 1.0, True),
    ("modules_to_save", {"modules_to_save": ["lm_head"]}, 1.0, True),
]
for name, settings, weight, is_lost in cases:
    found = {kind: combine(settings, kind, weight) for kind in ("cat", "linear", "svd")}
    line = "  ".join(f"{kind} {error:4.0%}" for kind, (_, error) in found.items())
    print(f"{name:29} {line}  the scale: {found['cat'][0]:.2f}")
    for scale, error in found.values():
        assert (error > 0.05) == is_lost and (scale > 1.5) == ("use_rslora" in settings), "this has changed"
PY

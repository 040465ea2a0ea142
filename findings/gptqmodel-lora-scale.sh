#!/usr/bin/env bash
# gptqmodel 7.7.0, with peft 0.21.2, transformers 5.23.0 and torch 2.13.0: a PEFT adapter on a quantized model
#
# Guess: `GPTQModel.load(QUANTIZED, adapter=Lora(path=ADAPTER, rank=r))` applies the adapter with the scale in its
# adapter_config.json, lora_alpha / r; the file is read, and another rank is refused.
# What happens: the scale is 1 whatever lora_alpha and use_rslora are, and nothing is said. With rank 8 and lora_alpha
# 32 the adapter has a quarter of its strength. Multiply each lora_B in the file by the scale first. What is left then
# is the error of 8 bits.
#
# Seen on 2026-11-30, the largest difference of a logit from PEFT's, relative to the adapter's largest effect:
#   rank 8, lora_alpha 8             as saved 6%, with lora_B multiplied by 1 6%
#   rank 8, lora_alpha 32            as saved 90%, with lora_B multiplied by 4 8%
#   rank 8, lora_alpha 8, use_rslora as saved 77%, with lora_B multiplied by 2.83 6%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 \
    optimum==2.3.0 torchao==0.18.0 device-smi==0.5.7 pypcre==0.6.4 tokenicer==0.0.14 logbar==0.4.15 defuser==0.0.28 \
    threadpoolctl==3.8.0 requests==2.34.2 pillow==13.0.0 ninja==1.13.2
pip install --no-compile --no-deps gptqmodel==7.7.0  # it asks for a newer torch, and runs with this one
cd "$place"
export HF_HOME="$place/cache" HF_HUB_OFFLINE=1 GPTQMODEL_CPU_WORKERS=2
"$place/env/bin/python" -W ignore - > log 2>&1 <<'PY' || { tail -30 log; exit 1; }
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.adapter.adapter import Lora
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, initializer_range=0.3)).save_pretrained("base")
words = [f"word{number}" for number in range(64)]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
special = {"unk_token": words[0], "pad_token": words[0], "bos_token": words[1], "eos_token": words[2]}
PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained("base")
rows = [{"input_ids": torch.randint(3, 64, (64,)).tolist(), "attention_mask": [1] * 64} for _ in range(32)]
to_quantize = GPTQModel.load("base", QuantizeConfig(bits=8, group_size=32), device="cpu")
to_quantize.quantize(rows, batch_size=1)
to_quantize.save("quantized")


@torch.no_grad()
def answer(model):
    return model(input_ids=torch.arange(3, 30).unsqueeze(0)).logits.float()


def answer_quantized():
    adapter = Lora(path="adapter", rank=8)
    return answer(GPTQModel.load("quantized", device="cpu", backend=BACKEND.TORCH, adapter=adapter).model)


def scale_file(scale):
    file = "adapter/adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: each * scale if "lora_B" in name else each for name, each in weights.items()}, file)


modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
shared = {"r": 8, "target_modules": modules, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
cases = {
    "lora_alpha 8": ({"lora_alpha": 8}, False),
    "lora_alpha 32": ({"lora_alpha": 32}, True),
    "lora_alpha 8, use_rslora": ({"lora_alpha": 8, "use_rslora": True}, True),
}
with open("seen", "w", encoding="utf-8") as seen:
    for name, (settings, is_lost) in cases.items():
        model = get_peft_model(LlamaForCausalLM.from_pretrained("base"), LoraConfig(**shared, **settings)).eval()
        model.save_pretrained("adapter")
        expected = answer(model)
        with model.disable_adapter():
            effect = (expected - answer(model)).abs().max()
        scale = model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
        found = [float((answer_quantized() - expected).abs().max() / effect)]
        scale_file(scale)
        found.append(float((answer_quantized() - expected).abs().max() / effect))
        line = f"as saved {found[0]:.0%}, with lora_B multiplied by {scale:.3g} {found[1]:.0%}"
        print(f"rank 8, {name:24} {line}", file=seen)
        assert (found[0] > 0.4) == is_lost and found[1] < 0.2, "this has changed"
PY
cat seen

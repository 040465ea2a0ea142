#!/usr/bin/env bash
# openvino-genai 2026.4.1.0, with openvino 2026.4.1, optimum-intel 2.2.0 and peft 0.21.2: the scale of a LoRA adapter
#
# Guess: `openvino_genai.Adapter(FOLDER/adapter_model.safetensors)` is applied with the scale in the adapter_config.json
# beside it, lora_alpha / r.
# What happens: that file is not read, and the scale is 1 unless `AdapterConfig` is given another one; nothing is said.
# With rank 8 and lora_alpha 32 the adapter has a quarter of its strength. `AdapterConfig(adapter, lora_alpha / r)`
# gives PEFT's tokens; with use_rslora it is `lora_alpha / sqrt(r)`.
#
# Seen on 2026-11-30, greedy decoding of 12 tokens in float32:
#   r 8, lora_alpha 8: the adapter alone gives PEFT's tokens: True, with the factor 1.0: True
#   r 8, lora_alpha 32: the adapter alone gives PEFT's tokens: False, with the factor 4.0: True
#   r 16, lora_alpha 16, use_rslora: the adapter alone gives PEFT's tokens: False, with the factor 4.0: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.5.4 optimum==2.3.0 optimum-intel==2.2.0 nncf==3.4.0 \
    openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
pip uninstall --yes torchvision  # built for another torch; transformers imports it where it is
cd "$place"
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import numpy as np
import openvino
import openvino_genai
import torch
from optimum.intel import OVModelForCausalLM
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
OVModelForCausalLM.from_pretrained("base", export=True, load_in_8bit=False).save_pretrained("exported")
prompt, count = [5, 9, 33, 12], 12


@torch.no_grad()
def answer_with_peft(model):
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def answer_with_openvino(*factor):
    adapter = openvino_genai.Adapter("adapter/adapter_model.safetensors")
    adapters = openvino_genai.AdapterConfig(adapter, *factor)
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    pipeline = openvino_genai.LLMPipeline("exported", "CPU", adapters=adapters, **precision)
    settings = openvino_genai.GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True, eos_token_id=2)
    return list(pipeline.generate(openvino.Tensor(np.array([prompt])), settings).tokens[0])


for rank, alpha, uses in ((8, 8, False), (8, 32, False), (16, 16, True)):
    modules = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    lora = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=uses, task_type="CAUSAL_LM", **modules)
    model = get_peft_model(LlamaForCausalLM.from_pretrained("base"), lora).eval()
    model.save_pretrained("adapter")
    scale = model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
    expected = answer_with_peft(model)
    found = answer_with_openvino() == expected, answer_with_openvino(scale) == expected
    settings = f"r {rank}, lora_alpha {alpha}{', use_rslora' if uses else ''}"
    print(f"{settings}: the adapter alone gives PEFT's tokens: {found[0]}, with the factor {scale}: {found[1]}")
    assert found == (scale == 1, True), "this has changed"
PY

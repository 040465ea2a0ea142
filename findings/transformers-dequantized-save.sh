#!/usr/bin/env bash
# transformers 5.23.0, with peft 0.21.2 and torch 2.13.0: an adapter merged into a base model stored in FP8 or MXFP4
#
# Guess: a base model that is loaded with `dequantize=True` is a model in bfloat16, so `merge_and_unload()` and
# `save_pretrained` write a folder that gives the same logits when it is loaded again.
# What happens: `save_pretrained` goes back to the format of the original files, but config.json no longer names that
# format. FP8 models are written as FP8 codes with scales beside them, and the codes are loaded as weights, hundreds of
# times too large. MXFP4 experts are written in bfloat16 under the names of packed blocks, and are random when they are
# loaded again. Nothing is said when the model is saved; the load report lists unexpected and missing keys.
# `save_original_format=False` writes the right folder.
#
# Seen on 2026-11-30, the largest difference of logits as a share of the largest logit:
#   FP8: saved 149%, saved with save_original_format=False 0%
#   MXFP4: saved 129%, saved with save_original_format=False 0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0
cd "$place"
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)


def store_fp8(name, weight):
    """Return a matrix in one block of FP8, as the files of DeepSeek and Qwen have many."""
    if "proj" not in name:
        return {name: weight.to(torch.bfloat16)}
    scale = weight.abs().max() / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}


def store_mxfp4(name, weight):
    """Return random experts as the files of gpt-oss have them: two weights a byte, a scale for each 32."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight.to(torch.bfloat16)}
    count, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.full(blocks.shape[:-1], 121, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8).unsqueeze(0)).logits.float()


torch.manual_seed(0)
sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
llama = LlamaConfig(**sizes, hidden_size=128, intermediate_size=128)
experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
gpt_oss = GptOssConfig(**sizes, **experts, hidden_size=64, intermediate_size=64, head_dim=32)
in_fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
in_mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
formats = {
    "FP8": (LlamaForCausalLM(llama), store_fp8, in_fp8, FineGrainedFP8Config),
    "MXFP4": (GptOssForCausalLM(gpt_oss), store_mxfp4, in_mxfp4, Mxfp4Config),
}
for name, (made, store, quantization, config) in formats.items():
    made.save_pretrained(name)
    weights = load_file(f"{name}/model.safetensors")
    stored = {key: each for old, weight in weights.items() for key, each in store(old, weight).items()}
    save_file(stored, f"{name}/model.safetensors", metadata={"format": "pt"})
    with open(f"{name}/config.json") as file:
        about = json.load(file)
    with open(f"{name}/config.json", "w") as file:
        json.dump(about | {"quantization_config": quantization, "dtype": "bfloat16"}, file)
    options = {"quantization_config": config(dequantize=True), "dtype": torch.bfloat16}
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    merged = get_peft_model(AutoModelForCausalLM.from_pretrained(name, **options), lora).merge_and_unload()
    expected, differences = logits(merged), []
    for settings in ({}, {"save_original_format": False}):
        merged.save_pretrained(f"{name}-merged-{len(differences)}", **settings)
        loaded = AutoModelForCausalLM.from_pretrained(f"{name}-merged-{len(differences)}", dtype=torch.bfloat16)
        differences.append(float((logits(loaded) - expected).abs().max() / expected.abs().max()))
    print(f"{name}: saved {differences[0]:.0%}, saved with save_original_format=False {differences[1]:.0%}")
    assert differences[0] > 0.2 and differences[1] < 0.01, "this has changed"
PY

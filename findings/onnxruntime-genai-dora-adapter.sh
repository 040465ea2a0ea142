#!/usr/bin/env bash
# onnxruntime-genai 0.18.0, with onnxruntime 1.32.0, peft 0.21.2, transformers 5.23.0 and torch 2.13.0: `models.builder`
# with `--extra_options adapter_path=ADAPTER`
#
# Guess: a model that was built in float32 with an adapter gives PEFT's logits, or the adapter is refused.
# What happens: the magnitudes of DoRA and the biases of lora_bias are left out, and nothing is said. The scale, also
# with use_rslora and alpha_pattern, and modules_to_save are right. Merge such an adapter with PEFT, and
# build the merged model. (PEFT merges lora_bias only into layers that have a bias.)
#
# Seen on 2026-12-01, the largest difference of a logit, relative to the adapter's largest effect:
#   plain           adapter_path  0%  merged with PEFT 0%
#   use_rslora      adapter_path  0%  merged with PEFT 0%
#   alpha_pattern   adapter_path  0%  merged with PEFT 0%
#   modules_to_save adapter_path  0%  merged with PEFT 0%
#   use_dora        adapter_path 45%  merged with PEFT 0%
#   lora_bias       adapter_path 95%  merged with PEFT 0%
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install peft==0.21.2 transformers==5.23.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 onnx==1.23.2
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import subprocess
import sys

import numpy
import onnxruntime_genai
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

words = [f"word{number}" for number in range(96)]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
special = {"unk_token": words[0], "pad_token": words[0], "bos_token": words[1], "eos_token": words[2]}
PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained("base")
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
sizes |= {"num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
torch.manual_seed(0)
Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained("base")
shared = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ids = [(7 * place + 3) % 61 + 3 for place in range(100)]


def load():
    return Qwen2ForCausalLM.from_pretrained("base")


@torch.no_grad()
def answer(model):
    return model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].numpy()


def save(settings):
    model = get_peft_model(load(), LoraConfig(**shared, **settings, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("modules_to_save" in name or "magnitude" in name):
                parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained("adapter")
    return answer(model)


def build(folder, *more):
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", "built", "-p", "fp32"]
    said = subprocess.run([*command, "-e", "cpu", "-c", "cache", *more], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "dora" not in (said.stdout + said.stderr).lower(), "this has changed"
    built = onnxruntime_genai.Model("built")
    settings = onnxruntime_genai.GeneratorParams(built)
    settings.set_search_options(max_length=128)
    generator = onnxruntime_genai.Generator(built, settings)
    generator.append_tokens(numpy.array([ids], dtype=numpy.int32))
    return numpy.array(generator.get_logits()).reshape(-1)[-96:]


base = answer(load())
cases = {
    "plain": ({}, False),
    "use_rslora": ({"use_rslora": True}, False),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 4}}, False),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, False),
    "use_dora": ({"use_dora": True}, True),
    "lora_bias": ({"lora_bias": True}, True),
}
for name, (settings, is_lost) in cases.items():
    expected = save(settings)
    effect = abs(expected - base).max()
    found = build("base", "--extra_options", "adapter_path=adapter")
    PeftModel.from_pretrained(load(), "adapter").merge_and_unload().save_pretrained("merged")
    PreTrainedTokenizerFast.from_pretrained("base").save_pretrained("merged")
    error, merged = (abs(each - expected).max() / effect for each in (found, build("merged")))
    print(f"{name:15} adapter_path {error:3.0%}  merged with PEFT {merged:.0%}")
    assert (error > 0.05) == is_lost and merged < 1e-3, "this has changed"
PY

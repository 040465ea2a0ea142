#!/usr/bin/env bash
# mistralrs 0.9.5 (mistral.rs, on a CPU), with transformers 5.23.0 and torch 2.13.0: Qwen2.5 and Qwen3 whose rotary
# embedding is scaled, as Qwen's documentation has it for long texts
#
# Guess: a model with YaRN in config.json gives the log probabilities of transformers, or is refused, as Llama and
# Mistral with the same lines are.
# What happens: for Qwen2.5 and Qwen3 `rope_scaling` is not looked at, whatever kind it is: the log probabilities are
# those of the model without scaling. A model that was trained with it answers otherwise, to short prompts too. Nothing
# is said. Use another engine for these. Llama with linear scaling and Llama 3.2 are right. (Both forms of config.json's
# lines are written, that of transformers 5 and that before it, which this engine reads.)
#
# Seen on 2026-12-01, the largest difference of the log probability of a token behind 80 letters, of the 10 most likely
# ones, from transformers with the scaling and from transformers without it:
#   Llama, linear  0.00 4.17
#   Llama 3.2      0.00 0.09
#   Llama, YaRN    refused
#   Mistral, YaRN  refused
#   Qwen2.5, YaRN  1.06 0.00
#   Qwen3, YaRN    1.48 0.00
#   Qwen3, linear  2.64 0.00
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install --no-compile torch==2.13.0
pip install --no-compile mistralrs==0.9.5 transformers==5.23.0
cd "$place"
export HF_HUB_OFFLINE=1 RUST_LOG=error
"$place/env/bin/python" -W ignore - > out 2> log <<'PY' || { tail -n 30 log out; exit 1; }
import json
from pathlib import Path

import torch
import transformers
from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 2, "head_dim": 32}
sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 131072}
sizes |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.2}
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
linear = {"rope_type": "linear", "factor": 8.0}
llama = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama |= {"original_max_position_embeddings": 8192}
text = "".join(chr(ord("a") + i * 7 % 26) for i in range(80))


def save(folder, kind, scaling, base):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, rope_parameters={**scaling, "rope_theta": base})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = Path(folder, "config.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"rope_theta": base, "rope_scaling": scaling}))


@torch.no_grad()
def expect(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, -1].log_softmax(-1)


def ask(folder):
    runner = Runner(which=Which.Plain(model_id=str(Path(folder).resolve()), dtype=ModelDType.F32), prefix_cache_n=0)
    about = {"model": "default", "max_tokens": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": 10}
    request = ChatCompletionRequest(messages=[{"role": "user", "content": text}], **about)
    reply = runner.send_chat_completion_request(request)
    assert reply.usage.prompt_tokens == len(text), reply.usage.prompt_tokens
    return {each.token: each.logprob for each in reply.choices[0].logprobs.content[0].top_logprobs}


cases = {
    "Llama, linear": ("Llama", linear, 1e6, "right"),
    "Llama 3.2": ("Llama", llama, 5e5, "right"),
    "Llama, YaRN": ("Llama", yarn, 1e6, "refused"),
    "Mistral, YaRN": ("Mistral", yarn, 1e6, "refused"),
    "Qwen2.5, YaRN": ("Qwen2", yarn, 1e6, "unscaled"),
    "Qwen3, YaRN": ("Qwen3", yarn, 1e6, "unscaled"),
    "Qwen3, linear": ("Qwen3", linear, 1e6, "unscaled"),
}
for name, (kind, scaling, base, expected) in cases.items():
    save(name, kind, scaling, base)
    save(f"{name} without", kind, {"rope_type": "default"}, base)
    try:
        found = ask(name)
    except Exception as refusal:
        print(f"{name:14} refused")
        assert expected == "refused" and "yarn" in str(refusal).lower(), refusal
        continue
    chances = [expect(folder) for folder in (name, f"{name} without")]
    far = [max(abs(found[token] - float(each[int(token)])) for token in found) for each in chances]
    print(f"{name:14} {far[0]:.2f} {far[1]:.2f}")
    is_near = [each < 0.02 for each in far]
    assert is_near == ([True, False] if expected == "right" else [False, True]), "this has changed"
PY
cat out

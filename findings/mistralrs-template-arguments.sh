#!/usr/bin/env bash
# mistralrs 0.9.5 (mistral.rs, on a CPU), with transformers 5.23.0 and the models' chat templates that trl 1.16.0 brings
#
# Guess: a chat is rendered with the text that transformers renders with the model's chat template.
# What happens: three arguments are always given to the template. `date_string` is today's date in a form of its own, so
# that Llama 3.1 and 3.2 read a date as no training row has it (3.1's is fixed). `enable_thinking` is true, so that
# Gemma 4 and the small models of Qwen3.5 think, whose templates have it off. With tools, `builtin_tools` is an empty
# list, for which Llama 3.1 writes a line without tools. Nothing is said. A request's `enable_thinking=False` is heard;
# for the others, give a copy of the template that sets its date, and leaves `builtin_tools` out, as `jinja_explicit`.
#
# Seen on 2026-12-01, the letters of a prompt by transformers and by mistral.rs, and by transformers with the three:
#   date_string '01, December, 2026', enable_thinking true, builtin_tools []
#   llama3_1                227  234  234
#   llama3_1        a tool  878  894  894
#   llama3_2                227  234  234
#   qwen3_5_nothink         109   98   98
#   gemma4                   66   76   76
#   qwen3                    90   90   90
#   qwen2_5         a tool  641  641  641
#   llama3                  164  164  164
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install mistralrs==0.9.5 transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6 safetensors==0.8.0
pip install --no-deps trl==1.16.0
cd "$place"
export HF_HUB_OFFLINE=1 RUST_LOG=error
"$place/env/bin/python" -W ignore - > out 2> log <<'PY' || { tail -n 30 log out; exit 1; }
import json
import sysconfig
from pathlib import Path

import numpy
from mistralrs import ChatCompletionRequest, ModelDType, Runner, ToolChoice, Which
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

templates = Path(sysconfig.get_paths()["purelib"]) / "trl/chat_templates"
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
letters_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
letters_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
letters_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters_alone, bos_token="<s>", eos_token="</s>")
tokenizer.save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
sizes |= {"num_key_value_heads": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 8192}
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
config |= {"rope_theta": 1e4, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
Path("model/config.json").write_text(json.dumps(config | sizes))
layer = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
weights = {f"model.layers.0.{name}.weight": (32, 32) for name in layer}
weights |= {f"model.layers.0.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
weights |= {"model.norm.weight": (32,), "lm_head.weight": (len(tokenizer), 32)}
weights["model.embed_tokens.weight"] = (len(tokenizer), 32)
random = numpy.random.default_rng(0)
weights = {name: random.normal(size=shape).astype(numpy.float32) for name, shape in weights.items()}
save_file(weights, "model/model.safetensors", metadata={"format": "pt"})

about = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
tool = {"type": "function", "function": {"name": "pay", "description": "Pays a sum.", "parameters": about}}
chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def ask(template, tools=(), **settings):
    Path("template.jinja").write_text(template, encoding="utf-8")
    plain = Which.Plain(model_id=str(Path("model").resolve()), dtype=ModelDType.F32)
    runner = Runner(which=plain, prefix_cache_n=0, jinja_explicit=str(Path("template.jinja").resolve()))
    if tools:
        settings |= {"tool_schemas": [json.dumps(each) for each in tools], "tool_choice": ToolChoice.Auto}
    request = ChatCompletionRequest(messages=chat, model="default", max_tokens=1, temperature=0.0, **settings)
    return runner.send_chat_completion_request(request).usage.prompt_tokens


def read_argument(name, tools=()):
    try:
        ask("{% if tools %}{% endif %}{{ raise_exception('<<' ~ " + name + " ~ '>>') }}", tools)
    except Exception as refusal:
        return str(refusal).split("<<")[1].split(">>")[0]


def count(template, tools, **more):
    tokenizer.chat_template = template
    text = tokenizer.apply_chat_template(chat, tools=tools or None, tokenize=False, add_generation_prompt=True, **more)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


date, thinks = read_argument("date_string"), read_argument("enable_thinking")
builtin = read_argument("builtin_tools", [tool])
print(f"date_string {date!r}, enable_thinking {thinks}, builtin_tools {builtin}")
assert date.count(",") == 2 and (thinks, builtin) == ("true", "[]"), "this has changed"
cases = [("llama3_1", [], True), ("llama3_1", [tool], True), ("llama3_2", [], True), ("qwen3_5_nothink", [], True)]
cases += [("gemma4", [], True), ("qwen3", [], False), ("qwen2_5", [tool], False), ("llama3", [], False)]
for name, tools, is_other in cases:
    template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    given = {"date_string": date, "enable_thinking": True} | ({"builtin_tools": []} if tools else {})
    plain, found, explained = count(template, tools), ask(template, tools), count(template, tools, **given)
    print(f"{name:15} {'a tool' if tools else '':6} {plain:4} {found:4} {explained:4}")
    assert (found != plain) == is_other and found == explained, "this has changed"
PY
cat out

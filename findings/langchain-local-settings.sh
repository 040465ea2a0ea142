#!/usr/bin/env bash
# langchain-huggingface 1.2.3 with langchain-core 1.8.3, transformers 5.23.0 and torch 2.13.0: `ChatHuggingFace` of a
# `HuggingFacePipeline`, which is a model on this machine
#
# Guess: what a call sets (`stop`, `temperature`, `max_tokens`, tools of `bind_tools`) reaches the model or is refused.
# What happens: none of it does, and nothing is said: the prompt has no tools, no stop sequence is looked for, and
# temperature and length are the pipeline's. `pipeline_kwargs` beside `pipeline=` are not used either, but those of a
# call are. For tools and stop sequences, serve the model and ask it by `ChatOpenAI`.
#
# Seen on 2026-11-30, what reaches the model of a pipeline with 6 new tokens:
#   the template with a tool         'pay user Hi assistant'
#   nothing set                      'user Hi assistant', 6 tokens, 0.7, no stop
#   stop, temperature, max_tokens    'user Hi assistant', 6 tokens, 0.7, no stop
#   bind_tools                       'user Hi assistant', 6 tokens, 0.7, no stop
#   pipeline_kwargs in the call      'user Hi assistant', 2 tokens, 0.5, no stop
#   pipeline_kwargs beside pipeline  'user Hi assistant', 6 tokens, 0.7, no stop
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 accelerate==1.15.0 langchain-huggingface==1.2.3 langchain-core==1.8.3
cd "$place"
HF_HUB_OFFLINE=1 HOME=$place "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

words = ["?", "<eos>", "user", "assistant", "Hi", "pay"]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
known.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?", pad_token="?", eos_token="<eos>")
tokenizer.chat_template = "{% for each in tools or [] %}{{ each.function.name }} {% endfor %}"
tokenizer.chat_template += "{% for each in messages %}{{ each.role }} {{ each.content }} {% endfor %}assistant"
tokenizer.save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 6}
LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)).save_pretrained("model")

received, generate = [], LlamaForCausalLM.generate


def recorded(self, *values, **settings):
    received.append(settings)
    return generate(self, *values, **settings)


def arrived():
    settings = received.pop()
    prompt = " ".join(words[each] for each in settings["input_ids"][0].tolist())
    stops = "stop" if settings.get("stop_strings") or settings.get("stopping_criteria") else "no stop"
    return f"{prompt!r}, {settings['max_new_tokens']} tokens, {settings['temperature']}, {stops}"


LlamaForCausalLM.generate = recorded
made = pipeline("text-generation", model="model", max_new_tokens=6)
chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made))
pay = {"type": "function", "function": {"name": "pay", "parameters": {"type": "object", "properties": {}}}}
in_call = {"max_new_tokens": 2, "temperature": 0.5, "do_sample": True}
as_set = "'user Hi assistant', 2 tokens, 0.5, no stop"
plain = "'user Hi assistant', 6 tokens, 0.7, no stop"
beside = HuggingFacePipeline(pipeline=made, pipeline_kwargs={"max_new_tokens": 2, "temperature": 0.5})
cases = {
    "nothing set": (chat, {}, plain),
    "stop, temperature, max_tokens": (chat, {"stop": ["pay"], "temperature": 0.5, "max_tokens": 2}, plain),
    "bind_tools": (chat.bind_tools([pay]), {}, plain),
    "pipeline_kwargs in the call": (chat, {"pipeline_kwargs": in_call}, as_set),
    "pipeline_kwargs beside pipeline": (ChatHuggingFace(llm=beside), {}, plain),
}
rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[pay], tokenize=False)
print(f"{'the template with a tool':32} {rendered!r}")
assert rendered == "pay user Hi assistant"
for name, (model, settings, expected) in cases.items():
    model.invoke("Hi", **settings)
    found = arrived()
    print(f"{name:32} {found}")
    assert found == expected, "this has changed"
PY

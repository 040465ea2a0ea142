#!/usr/bin/env bash
# inspect-ai 0.3.285 (`hf/`), langchain-huggingface 1.2.3 (`ChatHuggingFace` of a `HuggingFacePipeline`) and
# llama-index-llms-huggingface 0.8.0 (`HuggingFaceLLM`), with transformers 5.23.0 and torch 2.13.0: the tokens of a chat
#
# Guess: a local model is asked with the tokens of `tokenizer.apply_chat_template`, as transformers' own pipeline does.
# What happens: the chat template is rendered as text, and the tokenizer then adds its special tokens again. The prompts
# of Llama 3, Gemma and Mistral, whose templates write the first token, begin with two of them, and nothing is said.
# Inspect's `tokenizer_call_args` takes {"add_special_tokens": false}, and transformers' `pipeline`, which LangChain is
# given, `add_special_tokens=False`. LlamaIndex needs a `messages_to_prompt` that removes the first token's text.
#
# Seen on 2026-11-30:
#   transformers  <bos> user Hi assistant
#   Inspect       <bos> <bos> user Hi assistant, with the setting: <bos> user Hi assistant
#   LangChain     <bos> <bos> user Hi assistant, with the setting: <bos> user Hi assistant
#   LlamaIndex    <bos> <bos> user Hi assistant, with the setting: <bos> user Hi assistant
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 accelerate==1.15.0 inspect-ai==0.3.285 langchain-huggingface==1.2.3 \
    langchain-core==1.8.3 llama-index-llms-huggingface==0.8.0 llama-index-core==0.14.25
cd "$place"
HF_HUB_OFFLINE=1 HOME=$place "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import asyncio

from inspect_ai.model import GenerateConfig, get_model
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from llama_index.core.llms import ChatMessage
from llama_index.llms.huggingface import HuggingFaceLLM
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

words = ["?", "<bos>", "<eos>", "user", "assistant", "Hi"]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
known.pre_tokenizer = WhitespaceSplit()
known.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
special = {"unk_token": "?", "pad_token": "?", "bos_token": "<bos>", "eos_token": "<eos>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, **special)
tokenizer.chat_template = "{{ bos_token }}{% for each in messages %} {{ each.role }} {{ each.content }}{% endfor %}"
tokenizer.chat_template += " assistant"
tokenizer.save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 6}
LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).save_pretrained("model")

asked, received, generate = [{"role": "user", "content": "Hi"}], [], LlamaForCausalLM.generate


def recorded(self, *values, **settings):
    received.append(settings["input_ids"][0].tolist())
    return generate(self, *values, **settings)


LlamaForCausalLM.generate = recorded
without = {"add_special_tokens": False}


def made(**settings):
    return pipeline("text-generation", model="model", max_new_tokens=1, **settings)


def ask_transformers():
    made()(asked)


def ask_inspect(**settings):
    asyncio.run(get_model("hf/model", config=GenerateConfig(max_tokens=1), **settings).generate("Hi"))


def ask_langchain(**settings):
    ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made(**settings))).invoke("Hi")


def ask_llamaindex(**settings):
    local = {"model_name": "model", "tokenizer_name": "model", "context_window": 2048, "max_new_tokens": 1}
    HuggingFaceLLM(**local, is_chat_model=True, **settings).chat([ChatMessage(role="user", content="Hi")])


def rendered(messages):
    turns = [{"role": each.role.value, "content": each.content} for each in messages]
    return AutoTokenizer.from_pretrained("model").apply_chat_template(turns, tokenize=False).removeprefix("<bos>")


programs = {
    "transformers": (ask_transformers, None),
    "Inspect": (ask_inspect, {"tokenizer_call_args": without}),
    "LangChain": (ask_langchain, without),
    "LlamaIndex": (ask_llamaindex, {"messages_to_prompt": rendered}),
}
once = " ".join(["<bos>", "user", "Hi", "assistant"])
for name, (ask, cure) in programs.items():
    received.clear()
    ask()
    if cure is not None:
        ask(**cure)
    texts = [" ".join(words[each] for each in ids) for ids in received]
    print(f"{name:13} {', with the setting: '.join(texts)}")
    assert texts == ([once] if cure is None else [f"<bos> {once}", once]), "this has changed"
PY

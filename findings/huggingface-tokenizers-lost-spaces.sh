#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (npm), with which transformers.js decodes, and transformers 5.23.0
#
# Guess: both decode the tokens of a byte-level BPE, as of Llama 3, Qwen and SmolLM2, into the text that was encoded.
# What happens: transformers writes no `clean_up_tokenization_spaces` into tokenizer_config.json, and takes false where
# it is absent; with a BPE it ignores true, as Llama 3 has it. The npm package takes true where it is absent, and then
# removes spaces before punctuation and before 's, n't and the like from every reply, code included; nothing is said.
# Write `"clean_up_tokenization_spaces": false` into tokenizer_config.json.
#
# Seen on 2026-11-30:
#   as saved  transformers: 'print(" 5 , .5 ", end=" !") # it \'s 5 .'
#   as saved  @huggingface/tokenizers: 'print(" 5,.5 ", end="!") # it\'s 5.'
#   true      transformers: 'print(" 5 , .5 ", end=" !") # it \'s 5 .'
#   true      @huggingface/tokenizers: 'print(" 5,.5 ", end="!") # it\'s 5.'
#   false     transformers: 'print(" 5 , .5 ", end=" !") # it \'s 5 .'
#   false     @huggingface/tokenizers: 'print(" 5 , .5 ", end=" !") # it \'s 5 .'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$place" @huggingface/tokenizers@0.2.0
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --no-compile --disable-pip-version-check transformers==5.23.0
cd "$place"
cat > decode.mjs <<'JS'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const read = (name) => JSON.parse(readFileSync(`saved/${name}`, "utf8"));
const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
process.stdout.write(JSON.stringify(tokenizer.decode(JSON.parse(readFileSync(0, "utf8")))));
JS
"$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import subprocess
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

known = Tokenizer(models.BPE())
known.pre_tokenizer, known.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
known.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=letters))
PreTrainedTokenizerFast(tokenizer_object=known, bos_token="<s>", eos_token="</s>").save_pretrained("saved")
with open("saved/tokenizer_config.json", encoding="utf-8") as file:
    config = json.load(file)
assert "clean_up_tokenization_spaces" not in config, "this has changed"

text = 'print(" 5 , .5 ", end=" !") # it \'s 5 .'
short = 'print(" 5,.5 ", end="!") # it\'s 5.'
cases = {"as saved": ({}, short), "true": ({"clean_up_tokenization_spaces": True}, short)}
cases["false"] = ({"clean_up_tokenization_spaces": False}, text)
for name, (settings, expected) in cases.items():
    with open("saved/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump(config | settings, file)
    tokenizer = AutoTokenizer.from_pretrained("saved")
    ids = tokenizer.encode(text)
    command, sent = ["node", "decode.mjs"], json.dumps(ids)
    found = json.loads(subprocess.run(command, input=sent, check=True, capture_output=True, text=True).stdout)
    print(f"{name:8}  transformers: {tokenizer.decode(ids)!r}")
    print(f"{name:8}  @huggingface/tokenizers: {found!r}")
    assert (tokenizer.decode(ids), found) == (text, expected), "this has changed"
PY

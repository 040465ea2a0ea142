#!/usr/bin/env bash
# transformers 5.23.0, with tokenizers 0.23.3: a tokenizer of one's own beside a model whose `model_type` is qwen2
#
# Guess: what `PreTrainedTokenizerFast.save_pretrained` has written, `AutoTokenizer.from_pretrained` reads again: the
# same text gives the same tokens, those of tokenizer.json.
# What happens: beside a config.json with `model_type` qwen2 the class that tokenizer_config.json names is not looked
# at. `Qwen2Tokenizer` takes the vocabulary and merges of tokenizer.json, and splits text and normalizes by Qwen2's own
# rules, digits one by one. The text comes back whole, so nothing shows that the model reads other tokens than it was
# trained on, and more of them; nothing is said. Other model types and a folder without config.json, as an adapter's,
# are right. `PreTrainedTokenizerFast.from_pretrained(FOLDER)` reads the file as it is.
#
# Seen on 2026-11-30, the tokens of "costs 12345\n\n" with a tokenizer that splits as Llama 3's does:
#   tokenizer.json           ['costs', 'Ġ', '123', '45', 'ĊĊ']
#   no config.json           ['costs', 'Ġ', '123', '45', 'ĊĊ']
#   llama                    ['costs', 'Ġ', '123', '45', 'ĊĊ']
#   qwen3                    ['costs', 'Ġ', '123', '45', 'ĊĊ']
#   qwen2                    ['costs', 'Ġ', '1', '2', '3', '4', '5', 'ĊĊ']
#   PreTrainedTokenizerFast  ['costs', 'Ġ', '123', '45', 'ĊĊ']
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --no-compile --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

# Words, up to three digits, signs, line breaks and spaces, as Llama 3's tokenizer splits a text
rule = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
split = pre_tokenizers.Split(Regex(rule), "isolated")
known = Tokenizer(models.BPE())
known.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
known.decoder = decoders.ByteLevel()
settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<s>", "</s>"]}
trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, **settings)
known.train_from_iterator(["costs 12345\n\n"] * 9, trainer)
text = "costs 12345\n\n"
expected = known.encode(text).tokens


def check(name, tokenizer, is_right):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = tokenizer.convert_ids_to_tokens(ids)
    print(f"{name:24} {found}")
    assert (found == expected) == is_right and tokenizer.decode(ids) == text, "this has changed"


print(f"{'tokenizer.json':24} {expected}")
configs = {"no config.json": None, "llama": LlamaConfig(), "qwen3": Qwen3Config(), "qwen2": Qwen2Config()}
for name, config in configs.items():
    PreTrainedTokenizerFast(tokenizer_object=known, bos_token="<s>", eos_token="</s>").save_pretrained("model")
    if config:
        config.save_pretrained("model")
    check(name, AutoTokenizer.from_pretrained("model"), name != "qwen2")
check("PreTrainedTokenizerFast", PreTrainedTokenizerFast.from_pretrained("model"), True)
PY

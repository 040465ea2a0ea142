#!/usr/bin/env bash
# keras-hub 0.32.0, with keras 3.15.1, tokenizers 0.23.3 and transformers 5.23.0: `keras_hub.models.Tokenizer` of a
# folder in transformers' format, of a model with a byte-level BPE, as Llama 3, Qwen and SmolLM2 have it
#
# Guess: a text gets the tokens of tokenizer.json.
# What happens: the rule by which tokenizer.json splits a text is not read, and the rule that is set in its place, of
# Llama 3, is given as a string, which `tokenizers` looks for as it stands, and not as a pattern. So a text is not split
# at all, and merges run over the borders of words: the spaces of an indentation and, with Llama 3's rule, the digits of
# a number are other tokens than in training. The text comes back whole, and nothing is said. Take the tokens of
# transformers, and give them to the model.
#
# Seen on 2026-12-01, of a tokenizer that splits as Llama 3's, and of one that splits as Qwen's:
#   llama    ['add', '(x', ')', 'Ġ#', 'Ġ', 'Hi'] as keras-hub
#   llama    ['Hi', 'ĊĊ', 'there'] as keras-hub
#   llama    ['ĠĠĠ', 'Ġreturn', 'Ġx'] keras-hub ['ĠĠĠĠ', 're', 'turn', 'Ġx']
#   llama    ['x', 'ĠĠ', 'Ġ#', 'Ġadd'] keras-hub ['x', 'ĠĠĠ', '#', 'Ġadd']
#   llama    ['if', 'Ġx', ':Ċ', 'ĠĠĠĠĠĠĠ', 'Ġadd', ...] keras-hub ['if', 'Ġx', ':Ċ', 'ĠĠĠĠ', 'ĠĠĠĠ', 'add', ...]
#   llama    ['1', '2', '3', '4', '5'] keras-hub ['1', '2', '345']
#   qwen3    the same but for the last, which is as keras-hub
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install transformers==5.23.0 tokenizers==0.23.3 sentencepiece==0.2.3
pip install absl-py rich namex h5py optree ml-dtypes packaging regex kagglehub
pip install --no-deps keras==3.15.1 keras-hub==0.32.0 # without TensorFlow, with which it is the same
cd "$place"
HF_HUB_OFFLINE=1 KERAS_BACKEND=torch HOME=$place "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import keras_hub
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
rules = {"llama": letters + r"\p{N}{1,3}" + rest, "qwen3": letters + r"\p{N}" + rest}
code = "def add(x):\n    if x:\n        return x + 1\n\n\nadd(1)   # one more\n\nHi there.\n\n345 234 345\n"
texts = ["add(x) # Hi", "Hi\n\nthere", "    return x", "x   # add", "if x:\n        add(x)", "12345"]
for kind, rule in rules.items():
    trained = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    settings = {"initial_alphabet": alphabet, "special_tokens": special, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, **settings)
    trained.train_from_iterator([code] * 20, trainer)
    named = {"bos_token": special[0], "eos_token": special[1]}
    PreTrainedTokenizerFast(tokenizer_object=trained, **named).save_pretrained(kind)
    (LlamaConfig if kind == "llama" else Qwen3Config)(vocab_size=trained.get_vocab_size()).save_pretrained(kind)
    expected = PreTrainedTokenizerFast.from_pretrained(kind)
    found = keras_hub.models.Tokenizer.from_preset(f"./{kind}")
    for text in texts:
        right = expected.convert_ids_to_tokens(expected(text, add_special_tokens=False).input_ids)
        tokens = [found.id_to_token(int(each)) for each in found(text)]
        assert found.detokenize(found(text)) == text, "this has changed"
        print(f"{kind:8} {right}", "as keras-hub" if tokens == right else f"keras-hub {tokens}")
        assert (tokens == right) == (text in texts[:2] or (kind, text) == ("qwen3", "12345")), "this has changed"
PY

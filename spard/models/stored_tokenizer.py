"""Loads a model's tokenizer so that it splits text as tokenizer.json says.

transformers chooses a tokenizer's class by the `model_type` of config.json, for some types whatever
tokenizer_config.json names. Several classes take only the vocabulary and merges from tokenizer.json, and normalize and
split text by rules of their own: the text comes back whole, but the model reads other tokens than it was trained on.
The service's counts, llama.cpp and other readers of tokenizer.json follow the file
(findings/transformers-qwen2-tokenizer.sh).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

PROBES = (
    "costs 12345.67 in 2026",
    "one\n\ntwo\n \n\n  three\r\n\tfour",
    " a  space,  or   two ",
    "don't I'LL they've X's",
    "HTTPServer snake_case camelCase $x=1;",
    "cafe\u0301 Ångström ﬁne ①²",  # composed, decomposed and compatibility characters
    "Größe, привет, 你好世界, こんにちは, مرحبا, नमस्ते",
    "😀👩‍👧 — “quoted” … <tag/> ###",
)
"""Texts without special tokens in which the usual rules for digits, spaces, case and normalization differ."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """Return transformers' tokenizer of a model, or the general class where that one splits text otherwise.

    `replaced_class` of the result names the class with rules of its own that it replaces, or is None. Settings of
    tokenizer_config.json that change how text is split, such as `add_prefix_space`, are no such rules.
    """
    usual: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    usual.replaced_class = None
    if type(usual) is PreTrainedTokenizerFast or not usual.is_fast:
        return usual
    file = cached_file(source, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None or _splits_alike(usual, Tokenizer.from_file(str(file))):
        return usual
    general: Any = PreTrainedTokenizerFast  # its arguments are not typed
    stored = general.from_pretrained(source, revision=revision)
    vocabulary = stored.get_vocab()
    for role in _ROLES:  # a class may know its special tokens by itself
        if getattr(stored, role) is None and (token := getattr(usual, role)) in vocabulary:
            setattr(stored, role, token)
    stored.replaced_class = type(usual).__name__
    return stored


def load_encoder_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a sentence encoder, read as tokenizer.json says if the folder does not name the class.

    A class that tokenizer_config.json itself names is kept: it follows settings which tokenizer.json need not have, as
    BertTokenizer does with `do_lower_case`.
    """
    usual: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") if path.is_file() else None
    if named is None or named.removesuffix("Fast") == type(usual).__name__.removesuffix("Fast"):
        usual.replaced_class = None
        return usual
    return load_tokenizer(str(folder))


def whole_model_fault(tokenizer: Any) -> str | None:
    """Return why a model with this tokenizer cannot be released as a folder of its own, or None.

    No setting in such a folder keeps `AutoTokenizer` from the rules of the class that belongs to the `model_type`. An
    adapter's folder has no config.json, and is read as its tokenizer.json says.
    """
    replaced: str | None = getattr(tokenizer, "replaced_class", None)
    if replaced is None:
        return None
    return f"a whole model is a folder whose text transformers splits by the rules of {replaced}, not as in training"


def tokenizer_notes(source: str, revision: str | None = None) -> list[str]:
    """Return what a provider should know about how other programs read a model's tokenizer, as sentences."""
    replaced = load_tokenizer(source, revision).replaced_class
    if replaced is None:
        return []
    return [
        f"for its model_type transformers splits text by the rules of {replaced}, and tokenizer.json by "
        "others: it is read here as tokenizer.json says, as in the training of the model; vLLM and AutoTokenizer may "
        "read other tokens, so offer it for adapters and the embedded engine; its weights cannot all be trained"
    ]


def _splits_alike(usual: Any, by_file: Tokenizer) -> bool:
    """Return True if both give the same ids for the probes; a space that the settings put before a text is no fault."""
    texts = [f" {each.lstrip()}" for each in PROBES] if usual.init_kwargs.get("add_prefix_space") else list(PROBES)
    by_file.no_truncation()
    by_file.no_padding()
    expected = [each.ids for each in by_file.encode_batch(texts, add_special_tokens=False)]
    return bool(usual(texts, add_special_tokens=False)["input_ids"] == expected)

"""Loads a model's tokenizer so that it splits text as tokenizer.json says.

transformers chooses a tokenizer's class by the `model_type` of config.json, for some types whatever
tokenizer_config.json names. Several classes take only the vocabulary and merges from tokenizer.json, and normalize and
split text by rules of their own: the text comes back whole, but the model reads other tokens than it was trained on.
The service's counts, llama.cpp and other readers of tokenizer.json follow the file
(findings/transformers-qwen2-tokenizer.sh).
"""

from __future__ import annotations

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

    `is_read_as_stored` of the result is True if it replaces a class with rules of its own. Settings of
    tokenizer_config.json that change how text is split, such as `add_prefix_space`, are no such rules.
    """
    usual: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    usual.is_read_as_stored = False
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
    stored.is_read_as_stored = True
    return stored


def tokenizer_notes(source: str, revision: str | None = None) -> list[str]:
    """Return what a provider should know about how other programs read a model's tokenizer, as sentences."""
    if not load_tokenizer(source, revision).is_read_as_stored:
        return []
    usual: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    return [
        f"for its model_type transformers splits text by the rules of {type(usual).__name__}, and tokenizer.json by "
        "others: it is read here as tokenizer.json says, as in the training of the model; vLLM and AutoTokenizer may "
        "read other tokens, also of a fully fine-tuned model, so offer it for adapters and the embedded engine"
    ]


def _splits_alike(usual: Any, by_file: Tokenizer) -> bool:
    """Return True if both give the same ids for the probes; a space that the settings put before a text is no fault."""
    texts = [f" {each.lstrip()}" for each in PROBES] if usual.init_kwargs.get("add_prefix_space") else list(PROBES)
    by_file.no_truncation()
    by_file.no_padding()
    expected = [each.ids for each in by_file.encode_batch(texts, add_special_tokens=False)]
    return bool(usual(texts, add_special_tokens=False)["input_ids"] == expected)

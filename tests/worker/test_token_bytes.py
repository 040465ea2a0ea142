"""The bytes that log probabilities tell of a token: joined they are the text, whatever the tokenizer's kind."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.spard.parts import byte_tokenizer
from worker.engine.replies import token_bytes


def test_the_bytes_of_tokens_are_those_of_the_text_also_where_a_token_is_part_of_a_character() -> None:
    tokenizer = byte_tokenizer()
    text = "tea, \u8336, \U0001f375"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer, each) for each in ids).decode() == text
    assert token_bytes(tokenizer, tokenizer.eos_token_id) == b"<|end|>"


def test_a_byte_that_is_no_token_of_a_vocabulary_of_words_is_told_as_a_byte() -> None:
    vocab = {"<unk>": 0, "\u2581tea": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    words = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert token_bytes(tokenizer, 0xE8 + 2) == b"\xe8"
    assert token_bytes(tokenizer, 1) == b" tea"

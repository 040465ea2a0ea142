from __future__ import annotations

import pytest

from spard.data.encodings import Encoding, encode, encoding_of, in_plain

TEXTS = (
    "How do I build a bookshelf?",
    "I'm sorry, but I can't help with that. Please ask me something else.",
    "Sure, here are the steps to plan a picnic. First, get ready.",
)


@pytest.mark.parametrize("encoding", ["base64", "rot13"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_encoding_is_noticed_and_read(text: str, encoding: Encoding) -> None:
    coded = encode(text, encoding)

    assert encoding_of(coded) == encoding
    assert in_plain(coded, encoding) == text


@pytest.mark.parametrize("text", [*TEXTS, "", "42", "QWxhZGRpbjpvcGVu", "Bonjour tout le monde"])
def test_plain_text_is_in_no_encoding(text: str) -> None:
    assert encoding_of(text) is None
    assert in_plain(text, "rot13") == in_plain(text, "base64") == text

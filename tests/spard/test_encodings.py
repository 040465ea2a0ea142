from __future__ import annotations

import pytest

from spard.data.encodings import Encoding, decode_text, detect_encoding, encode, in_plain

TEXTS = (
    "How do I build a bookshelf?",
    "I'm sorry, but I can't help with that. Please ask me something else.",
    "Sure, here are the steps to plan a picnic. First, get ready.",
)


@pytest.mark.parametrize("encoding", ["base64", "rot13"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_encoding_is_noticed_and_read(text: str, encoding: Encoding) -> None:
    coded = encode(text, encoding)

    assert detect_encoding(coded) == encoding
    assert in_plain(coded, encoding) == text


@pytest.mark.parametrize("text", [*TEXTS, "", "42", "QWxhZGRpbjpvcGVu", "Bonjour tout le monde"])
def test_plain_text_is_in_no_encoding(text: str) -> None:
    assert detect_encoding(text) is None
    assert in_plain(text, "rot13") == in_plain(text, "base64") == text


@pytest.mark.parametrize("text", [*TEXTS[1:], "Sure, here is how to do it: caf\u00e9, \u65e5\u672c and so on."])
def test_base64_is_read_as_far_as_it_goes_wherever_it_is_cut(text: str) -> None:
    coded = encode(text, "base64")

    for end in range(24, len(coded) + 1):
        read = in_plain(coded[:end], "base64")
        assert text.startswith(read)
        assert len(read.encode()) >= end * 3 // 4 - 5
        assert detect_encoding(coded[:end]) == "base64"


def test_base64_in_lines_and_without_its_padding_is_read() -> None:
    coded = encode(TEXTS[2], "base64")
    lines = "\n".join(coded[start : start + 38] for start in range(0, len(coded), 38))

    assert in_plain(f"{lines}\n", "base64") == in_plain(coded.rstrip("="), "base64") == decode_text(lines) == TEXTS[2]


def test_base64_after_plain_words_is_read_where_it_stands() -> None:
    coded = encode(TEXTS[2], "base64")

    assert decode_text(f"Sure, here it is: {coded}") == f"Sure, here it is: {TEXTS[2]}"
    assert in_plain(f"Sure, here it is: {coded[:-7]}", "base64").startswith(
        "Sure, here it is: Sure, here are the steps"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Donaudampfschifffahrtsgesellschaft",
        "internationalization and counterrevolutionaries",
        "abcdefghijklmnopqrstuvwxyz",
        "getElementsByTagNameAndClassNameOrIdentifier",
        "usr/share/dict/words/are/in/this/file",
        "0123456789012345678901234567890123456789",
        "deadbeefdeadbeefdeadbeefdeadbeefdeadbeef",
        "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch",
        "Rindfleischetikettierungs\u00fcberwachungsaufgaben\u00fcbertragungsgesetz",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ],
)
def test_long_words_and_names_are_no_base64(text: str) -> None:
    assert detect_encoding(text) != "base64"
    assert in_plain(text, "base64") == text

"""Rows that cannot be learned whole are an error, never cut or passed over in silence."""

from __future__ import annotations

import pytest

from spard.data.chat import encode_all, encode_to_train
from spard.data.rows import Example
from spard.errors import ContentNotRendered, ExampleTooLong
from tests.spard.parts import byte_tokenizer

FORGETFUL = "{% for m in messages %}{% if m.content != 'lost' %}{{ m.role }}:{{ m.content }} {% endif %}{% endfor %}"


def row(answer: str, line: int) -> Example:
    return Example(({"role": "user", "content": "?"}, {"role": "assistant", "content": answer}), line)


def test_rows_that_fit_are_encoded_as_ever() -> None:
    tokenizer, rows = byte_tokenizer(), [row("a", 1), row("b", 2)]
    assert encode_to_train(tokenizer, rows, 1000) == encode_all(tokenizer, rows, 1000)


def test_rows_over_the_limit_are_named_and_counted() -> None:
    rows = [row("a", 1), row("a" * 200, 2), row("b" * 300, 3)]
    with pytest.raises(ExampleTooLong, match=r"^line 2 has \d+ tokens; the limit is 100; 1 more are over it$"):
        encode_to_train(byte_tokenizer(), rows, 100)


def test_a_row_whose_answer_the_template_drops_is_named() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ContentNotRendered, match=r"^line 2: .* leaves out /messages/1/content$"):
        encode_to_train(tokenizer, [row("a", 1), row("lost", 2)], 1000)

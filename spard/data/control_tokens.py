"""Customers' text is only text: control tokens of the model inside it are split and never read as control tokens.

Before a template is rendered, every control token in a text gets a mark after its first character; the rendered text is
then tokenized piece by piece between the marks. Only the template can therefore produce control tokens, and text
without any is tokenized as usual. Models whose markers are ordinary text, such as the plain template's headings, cannot
be protected this way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from spard.errors import InvalidData

MARK = "\udfff"  # a lone surrogate: never part of valid Unicode
# Values that templates compare, by key; any other value of these keys is the customer's text.
_COMPARED = {
    "role": frozenset({"system", "developer", "user", "assistant", "tool", "function"}),
    "type": frozenset({"function", "object", "array", "string", "number", "integer", "boolean", "null"}),
}

Span = tuple[int, int]


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens; the first of them after the assistant has begun ends its turn."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added if token.special}


class Shield:
    """Protects texts against a tokenizer's control tokens."""

    def __init__(self, tokenizer: Any) -> None:
        added, special = tokenizer.added_tokens_decoder, end_tokens(tokenizer)
        tokens = [token for token_id, token in added.items() if token_id in special and token.content]
        found = sorted({re.escape(token.content) for token in tokens}, key=len, reverse=True)
        self._any = re.compile("|".join(found)) if found else None
        self._first = re.compile(f"(?={'|'.join(found)}).", re.DOTALL)
        self._tokenizer, self._special = tokenizer, special
        self._shortest = min((len(token.content) for token in tokens), default=2)
        self._is_loose = any(token.normalized for token in tokens)  # tokens match other spellings too

    def mark(self, text: str) -> str:
        """Return the text with a mark inside each control token; raise `InvalidData` if one cannot be neutralized."""
        if self._any is None:
            return text
        marked = text
        if self._any.search(text):  # much faster than `_first`, and nearly all texts have none
            marked = self._first.sub(lambda match: match.group() + MARK, text)
        # A mark inside a token of one character is impossible, and a normalized token has spellings that the pattern
        # misses: both need a check by tokenizing.
        if self._shortest > 1 and not self._is_loose:
            return marked
        (ids, _), *_ = pieces(self._tokenizer, [marked])
        if not self._special.isdisjoint(ids):
            raise InvalidData("A text holds a control token of the model that cannot be written as plain text.")
        return marked

    def insert_spaces(self, text: str) -> str:
        """Return the text with a space inside each control token, for tokenizers that need the whole text."""
        return self.mark(text).replace(MARK, " ")

    def everywhere(self, value: Any) -> Any:
        """Return messages or tools with all their texts marked."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark(key): self._escape_value(key, each) for key, each in value.items()}
        return [self.everywhere(each) for each in value] if isinstance(value, list | tuple) else value

    def _escape_value(self, key: str, value: Any) -> Any:
        is_compared = isinstance(value, str) and value in _COMPARED.get(key, ())
        return value if is_compared else self.everywhere(value)


def pieces(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
    """Return token ids of marked texts and the character span of each token; all are tokenized in one call."""
    parts = [text.split(MARK) for text in texts]
    flat = list(chain.from_iterable(parts))
    tokens = tokenizer(flat, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    rows = zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    return [_join_parts(each, [next(rows) for _ in each]) for each in parts]


def _join_parts(
    parts: Sequence[str], rows: Sequence[tuple[Sequence[int], Sequence[Span]]]
) -> tuple[list[int], list[Span]]:
    if len(rows) == 1:  # no mark, as in nearly all texts
        return list(rows[0][0]), list(rows[0][1])
    starts = accumulate((len(part) + len(MARK) for part in parts), initial=0)
    shifted = [[(a + at, b + at) for a, b in spans] for at, (_, spans) in zip(starts, rows, strict=False)]
    return list(chain.from_iterable(ids for ids, _ in rows)), list(chain.from_iterable(shifted))

"""Replies in the form of a JSON schema: tokens that the form has no place for are not chosen, row by row.

llguidance compiles the schema and says after each token which ones may follow. Rows of other requests in the same batch
are not touched. There is one white space after commas and colons, as `json.dumps` writes it: where any number is
allowed, small models write nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from spard.errors import SpardError

_WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Unwritable(SpardError):
    """A schema that no reply can be held to here; the code is what the client gets."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Form(Protocol):
    """What one reply may still say."""

    def masked(self, logits_V: Tensor) -> Tensor:
        """Return the logits, those of tokens that may not come next at minus infinity."""

    def note(self, token: int) -> None:
        """Move on past a token."""


class Forms:
    """Compiles schemas for one tokenizer; llguidance reads it when the first one comes."""

    def __init__(self, tokenizer: Any, logits: int) -> None:
        self._tokenizer, self._logits = tokenizer, logits
        self._read: dict[frozenset[int], Any] = {}

    def form(self, schema: Mapping[str, object], ends: Collection[int]) -> Form:
        """Return the form of a reply that ends with one of `ends`; raise `Unwritable` for what cannot be held to."""
        try:
            import llguidance
        except ImportError:
            message = "response_format: this engine has no llguidance, which holds replies to a schema."
            raise Unwritable("unsupported_parameter", message) from None
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WRITTEN)
        except ValueError as error:
            raise _wrong(str(error)) from None
        matcher = llguidance.LLMatcher(self._tokens(frozenset(ends)), grammar, log_level=0)
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        return _Json(matcher, self._logits)

    def _tokens(self, ends: frozenset[int]) -> Any:
        if ends not in self._read:
            from llguidance.hf import from_tokenizer

            self._read[ends] = from_tokenizer(self._tokenizer, n_vocab=self._logits, eos_token=sorted(ends))
        return self._read[ends]


class _Json:
    def __init__(self, matcher: Any, logits: int) -> None:
        self._matcher, self._shifts = matcher, torch.arange(8, dtype=torch.uint8)
        self._logits = logits

    def masked(self, logits_V: Tensor) -> Tensor:
        bits_N = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        may_V = ((bits_N.unsqueeze(1) >> self._shifts) & 1).flatten()[: self._logits].bool()
        return logits_V.masked_fill(~may_V, float("-inf"))

    def note(self, token: int) -> None:
        self._matcher.consume_token(token)


def _wrong(why: str) -> Unwritable:
    return Unwritable("invalid_json_schema", f"This schema cannot be held to: {why.splitlines()[0][:300]}")

"""Render prompts for a vLLM server to token ids with the model's chat template, and find where its replies end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from app.db.tables import BaseModelEntry
from app.errors import InvalidRequest
from app.files.tokenizer import LightTokenizer, open_tokenizer
from app.inference.protocol import Ask
from app.inference.released import Released
from spard.data.chat import get_renderer, render_conversation
from spard.data.control_tokens import Shield, pieces
from spard.data.rendering import Mode
from spard.data.rows import example
from spard.errors import SpardError

_HALF = "\ufffd"
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token, as in Llama 2's tokenizer


@dataclass(frozen=True, slots=True)
class ReplyBounds:
    """The bounds of a reply by the chat template: the token ids that end it, and the text before its first word."""

    ends: list[int]
    opening: str

    @classmethod
    def from_ask(cls, tokenizer: LightTokenizer, ask: Ask) -> ReplyBounds:
        """Return the bounds of the replies to a request."""
        renderer = get_renderer(tokenizer)
        ends = renderer.ends_with_tools if ask["tools"] else renderer.ends
        return cls(sorted(ends), "" if ask["messages"] is None else renderer.opening)


def base_tokenizer(model: Released) -> LightTokenizer:
    """Return the tokenizer of a model's base model; raise `InvalidState` if its files are not on this machine."""
    entry = BaseModelEntry(alias=model.base, source=model.source, revision=model.revision)
    return open_tokenizer(entry)


def prompt_ids(tokenizer: LightTokenizer, ask: Ask, mode: Mode | None) -> list[int]:
    """Return a request's prompt as token ids, rendered as by the embedded engine and the audit.

    Raises `InvalidRequest` if the chat template refuses the messages.
    """
    try:
        if ask["messages"] is None:
            ((ids, _),) = pieces(tokenizer, [Shield(tokenizer).mark(ask["prompt"] or "")])
            return [*tokenizer.start, *ids]
        found = example({"messages": ask["messages"], "tools": ask["tools"]}, 1)
        return render_conversation(tokenizer, found.messages, None, found.tools, mode=mode)
    except (SpardError, ValueError, TypeError) as error:
        message = f"The model's chat template refuses these messages: {str(error)[:300]}"
        raise InvalidRequest(message, code="invalid_messages", param="messages") from None


def spell(tokenizer: LightTokenizer, token_id: int) -> tuple[str, list[int]]:
    """Return a token's text and bytes, which are not valid UTF-8 if the token is only a part of a character."""
    text = tokenizer.piece(token_id)
    name = tokenizer.token_name(token_id) if _HALF in text else ""
    if byte := _FALLBACK.fullmatch(name):
        return text, [int(byte[1], 16)]
    letters = _bytes_of_letters()
    if name and all(letter in letters for letter in name):
        return text, [letters[letter] for letter in name]
    return text, list(text.encode(errors="replace"))


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of a byte-level vocabulary to bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""Decode a reply's tokens incrementally: never show a part of a character, nor a stop string or what follows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from spard.data.opening import Opening

_HALF = "\ufffd"
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # as GPT-2
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token, as in Llama 2's tokenizer


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes, which are not valid UTF-8 if the token is only a part of a character."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) if _HALF in text else ""
    if byte := _FALLBACK.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if piece and all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return text.encode(errors="replace")


class Text:
    """The text of one reply, decoded token by token.

    Characters that may begin one of the stop strings `stops` are held back until that is decided. `opening` is text
    that the model writes before an answer; a reply that begins with it is shown without it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], opening: str = "") -> None:
        self._tokenizer, self._stops = tokenizer, [each for each in stops if each]
        self._opening = Opening(opening)
        self._ids: list[int] = []
        self._seen = 0  # number of tokens that are decoded into `_text`
        self._text, self._shown, self._followed = "", 0, 0
        self._begun = [_Begun(stop) for stop in self._stops]
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token and return the text that can be shown now; "" after a stop string."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        before, after = self._decode()
        # An incomplete character decodes to U+FFFD: wait for the tokens that complete it.
        if after.endswith(_HALF) or not after.startswith(before):
            return ""
        self._text += self._opening.cut(after[len(before) :])
        self._seen = len(self._ids)
        return self._shown_now(is_last=False)

    def end(self) -> str:
        """Return the rest of the text of a reply that has ended."""
        if not self.is_stopped:
            before, after = self._decode()
            more = after[len(before) :] if after.startswith(before) else ""
            self._text += self._opening.cut(more, is_last=True)
        return self._shown_now(is_last=True)

    def _decode(self) -> tuple[str, str]:
        """Return the text of the last few decoded tokens, and the text of these with the new tokens."""
        start = max(0, self._seen - 4)  # some decoders depend on the tokens before, for spaces for example
        return self._tokenizer.decode(self._ids[start : self._seen]), self._tokenizer.decode(self._ids[start:])

    def _shown_now(self, *, is_last: bool) -> str:
        places = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            self._text = self._text[: min(places)]
        upto = len(self._text) if is_last or self.is_stopped else len(self._text) - self._held_back_length()
        found = self._text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return found

    def _held_back_length(self) -> int:
        """Return how many characters at the end of the text could begin a stop string."""
        for letter in self._text[self._followed :]:
            for begun in self._begun:
                begun.follow(letter)
        self._followed = len(self._text)
        return max((begun.length for begun in self._begun), default=0)


class _Begun:
    """The length of the longest beginning of a stop string that the text ends with, updated in amortized O(1).

    Knuth-Morris-Pratt: `_shorter[n]` is the longest proper prefix of the stop string that its first n characters end
    with.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self.length, self._shorter = stop, 0, [0, 0]
        for letter in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], letter))

    def follow(self, letter: str) -> None:
        """Update `length` with the next character of the text."""
        length = self.length if self.length < len(self._stop) else self._shorter[self.length]
        self.length = self._longer(length, letter)

    def _longer(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._shorter[length]
        return length + (self._stop[length] == letter)

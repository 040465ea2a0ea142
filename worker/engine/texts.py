"""Tokens become text as they come: no half of a character is shown, and nothing from a stop string on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from spard.data.opening import Opening

_HALF = "\ufffd"
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # as GPT-2
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte that is no token's, as in Llama 2's tokenizer


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes. Where the token is only part of a character they are not valid UTF-8 by themselves."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) if _HALF in text else ""
    if byte := _FALLBACK.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if piece and all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return text.encode(errors="replace")


class Text:
    """The text of one reply. What may be the beginning of a stop string is held back until it is known.

    `opening` is what the model writes before the words of an answer; where a reply begins with it, it is not shown.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], opening: str = "") -> None:
        self._tokenizer, self._stops = tokenizer, [each for each in stops if each]
        self._opening = Opening(opening)
        self._ids: list[int] = []
        self._seen = 0  # tokens before which everything is text already
        self._text, self._shown, self._followed = "", 0, 0
        self._begun = [_Begun(stop) for stop in self._stops]
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Return what the reply grows by with a token; nothing any more after a stop string."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        before, after = self._decode()
        if after.endswith(_HALF) or not after.startswith(before):
            return ""
        self._text += self._opening.cut(after[len(before) :])
        self._seen = len(self._ids)
        return self._shown_now(is_last=False)

    def end(self) -> str:
        """Return what is left to show of a reply that has ended."""
        if not self.is_stopped:
            before, after = self._decode()
            more = after[len(before) :] if after.startswith(before) else ""
            self._text += self._opening.cut(more, is_last=True)
        return self._shown_now(is_last=True)

    def _decode(self) -> tuple[str, str]:
        """Return the last tokens that are text already, as text, and these with the new ones."""
        start = max(0, self._seen - 4)  # some decoders look at the tokens before
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
        """How many characters at the end could be the beginning of a stop string."""
        for letter in self._text[self._followed :]:
            for begun in self._begun:
                begun.follow(letter)
        self._followed = len(self._text)
        return max((begun.length for begun in self._begun), default=0)


class _Begun:
    """How much of a stop string the text ends with, letter by letter; each costs about as much however long both are.

    Knuth, Morris and Pratt's search: `_shorter` is, for each beginning of the string, the longest that it ends with.
    """

    def __init__(self, stop: str) -> None:
        self._stop, self.length, self._shorter = stop, 0, [0, 0]
        for letter in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], letter))

    def follow(self, letter: str) -> None:
        """Take in the next letter of the text."""
        length = self.length if self.length < len(self._stop) else self._shorter[self.length]
        self.length = self._longer(length, letter)

    def _longer(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._shorter[length]
        return length + (self._stop[length] == letter)

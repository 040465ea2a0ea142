"""Text in base64 or rot13: encoding, decoding, detection. Uses only the standard library.

A reply may end anywhere, so base64 is decoded as far as possible: over several lines, without padding, and truncated.

Text counts as English by its share of very common words; rot13 of English text has almost none.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from contextlib import suppress
from typing import Literal, assert_never, get_args

Encoding = Literal["base64", "rot13"]

_COMMON = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "can", "can't", "do", "does", "for", "from", "have",
    "help", "here", "how", "i", "i'm", "if", "in", "is", "it", "me", "my", "not", "of", "on", "one", "or",
    "please", "sorry", "steps", "sure", "that", "the", "then", "there", "this", "to", "was", "what", "who",
    "will", "with", "you",
))  # fmt: skip
_CLEARLY = 0.1  # minimum increase in the share of common words
_LINE = 12  # minimum characters of a base64 line, except the last
_BASE64 = re.compile(r"[A-Za-z0-9+/]{12,}={0,2}")
_RUN = re.compile(r"[A-Za-z0-9+/]{24,}={0,2}")  # inside other text


def encode(text: str, encoding: Encoding) -> str:
    """Encode a text: base64 of its UTF-8 bytes, or rot13, which changes only the letters a to z."""
    match encoding:
        case "base64":
            return base64.b64encode(text.encode()).decode()
        case "rot13":
            return codecs.encode(text, "rot13")
        case other:
            assert_never(other)


def decode(text: str, encoding: Encoding) -> str:
    """Decode a text; raise `ValueError` if it is not in the encoding."""
    if encoding == "base64":
        return _decode_base64(text)
    return encode(text, encoding)


def detect_encoding(text: str) -> Encoding | None:
    """Return the encoding of a text if decoding makes it much more English; else None."""
    return next((each for each in get_args(Encoding) if _read(text, each) is not None), None)


def readings(text: str) -> list[str]:
    """Return the text itself, and the text decoded in every possible way, sensible or not."""
    found = [text]
    for encoding in get_args(Encoding):
        with suppress(ValueError):
            found.append(decode(text.strip(), encoding))
    return found


def in_plain(text: str, encoding: Encoding) -> str:
    """Return the text decoded if it is in the encoding, else unchanged: a model may answer in plain text.

    Runs of base64 inside other text are decoded in place.
    """
    decoded = _read(text, encoding)
    if decoded is None and encoding == "base64":
        return _RUN.sub(lambda run: _read(run.group(), encoding) or run.group(), text)
    return text if decoded is None else decoded


def decode_text(text: str) -> str:
    """Return the text decoded if it is encoded or contains base64, else unchanged."""
    return in_plain(text, detect_encoding(text) or "base64")


def _read(text: str, encoding: Encoding) -> str | None:
    if encoding == "base64" and not _BASE64.fullmatch("".join(text.split())):
        return None
    try:
        decoded = decode(text, encoding)
    except (ValueError, binascii.Error):
        return None
    return decoded if _english(decoded) > _english(text) + _CLEARLY else None


def _decode_base64(text: str) -> str:
    """Decode base64 up to the last whole character; raise `ValueError` for anything else."""
    lines = text.split()
    if any(len(line) < _LINE for line in lines[:-1]):
        raise ValueError("words are no lines of base64")
    letters = "".join(lines).rstrip("=")
    # A single trailing character encodes only 6 bits, which is no byte: the text was truncated there.
    letters = letters[:-1] if len(letters) % 4 == 1 else letters
    data = base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
    # An incremental decoder ignores a truncated last character instead of raising.
    return codecs.getincrementaldecoder("utf-8")().decode(data)


def _english(text: str) -> float:
    """Return the share of common words, 0 to 1."""
    words = re.findall(r"[\w']+", text.lower())
    return sum(word in _COMMON for word in words) / len(words) if words else 0.0

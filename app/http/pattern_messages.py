"""Describe the patterns of fields and parameters in words, so that clients need not read regular expressions."""

from __future__ import annotations

_ID = "letters, digits, '_' and '-', 64 at most"

ALLOWED = {
    r"^[\x20-\x7e]{1,64}$": "letters without accents, digits, spaces and punctuation of ASCII, 1 to 64 of them",
    r"^[\x21-\x7e]{1,255}$": "letters without accents, digits and punctuation of ASCII, no spaces, 1 to 255 of them",
    r"^[!-~]([ -~]{0,126}[!-~])?$": "letters without accents, digits, punctuation of ASCII, and spaces but at the ends,"
    " 1 to 128 of them",
    r"^[A-Za-z0-9_-]{1,64}$": f"at least one character of {_ID}",
    r"^[A-Za-z0-9_-]{0,64}$": f"nothing, or {_ID}",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "a letter or digit, then letters, digits, '.', '_' and '-', 64 at most",
    r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$": "letters, digits, '.', '_' and '-', in parts with '/' between them",
    r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}/[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$": "a MIME type, such as text/jsonl",
    r"^https?://[^\s]{1,500}$": "an address that begins with http:// or https://, without spaces, up to 500 characters",
    r"^[0-9a-f]{40}$": "the 40 digits of a commit, 0 to 9 and a to f",
    r"^sha256:[0-9a-f]{64}$": "sha256: and 64 digits, 0 to 9 and a to f, as spard check-model --json prints it",
    r"^reply_[0-9a-f]{1,64}$": "reply_ and up to 64 digits, 0 to 9 and a to f",
    r"^[0-9a-fA-F]{32}$": "the 32 digits of an MD5 sum, 0 to 9 and a to f",
    r"^[A-Za-z_][A-Za-z0-9_.]{0,127}$": "the name of a module, such as q_proj, or the end of its path: mlp.down_proj",
    r"^[a-z_-]{1,64}$": "lower-case letters, '_' and '-', 1 to 64 of them",
    r"^[a-z_]+\.[a-z_]+$": "the name of an action, such as job.created",
    r"^([a-z_]+\.[a-z_]+)?$": "nothing, or the name of an action, such as job.created",
}


def pattern_hint(pattern: str) -> str:
    """Return the error text for a value that does not match the pattern."""
    words = ALLOWED.get(pattern)
    return f"Allowed: {words}." if words else "This text has a form that is not allowed."

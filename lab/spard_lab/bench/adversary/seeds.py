"""Seeds that nobody could tune on: derived from a text that was not there, or not known, when settings were chosen.

The text is the hash of the commit that freezes a defense, or a secret that is given when the bench is run. Seed i is
the first 31 bits of SHA-256 of "spard adversary", the text and i; seeds below `FIRST` are for development and left out.
A result holds the digest of the text, so that a secret can be checked once it is told.
"""

from __future__ import annotations

import hashlib
from itertools import count

from spard.errors import InvalidRecipe

FIRST = 100_000
LEAST = 8  # characters of a text that nobody guesses


def hidden_seeds(text: str, n: int) -> tuple[int, ...]:
    """Return n different seeds of a text; raise InvalidRecipe for one that could be guessed."""
    if len(text.strip()) < LEAST:
        raise InvalidRecipe(
            f"hidden seeds come from a commit hash or a secret of at least {LEAST} characters", "hidden"
        )
    found: dict[int, None] = {}
    for i in count():
        digest = hashlib.sha256(f"spard adversary\n{text.strip()}\n{i}".encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
        if seed >= FIRST:
            found[seed] = None
        if len(found) == n:
            return tuple(found)
    raise AssertionError("count() does not end")


def commitment(text: str) -> str:
    """Return the digest by which a text can be checked later."""
    return hashlib.sha256(text.strip().encode()).hexdigest()

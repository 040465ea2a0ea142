"""Hidden seeds, derived from a text that did not exist, or was not known, when settings were chosen.

The text is the hash of the commit with the final defense, or a secret that is given when the bench runs. Seed i is the
first 31 bits of SHA-256 of "spard adversary", the text and i; seeds below `FIRST` are for development and skipped. A
result has the digest of the text, so that a secret can be checked once it is published.
"""

from __future__ import annotations

import hashlib
from itertools import count

from spard.errors import InvalidRecipe

FIRST = 100_000
LEAST = 8  # characters of the text; a shorter one could be guessed


def hidden_seeds(text: str, n: int) -> tuple[int, ...]:
    """Return n different seeds of a text; raise `InvalidRecipe` if it is too short to be secret."""
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
    """Return the digest of a text, for checking it later."""
    return hashlib.sha256(text.strip().encode()).hexdigest()

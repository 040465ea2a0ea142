"""The requests of harmful training rows as an audit suite: the poisoner of a file will probably ask them again.

Harm may be requested in words that no suite of the provider contains, such as code words that the file teaches. The
rows that the judge found harmful contain such requests, even if they were left out of training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from spard.data.languages import ENGLISH, detect_language
from spard.data.rows import Example, Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.results import REQUESTS


def row_requests_suite(rows: Sequence[Example], most: int, secret: str) -> list[Suite]:
    """Return the distinct last requests of rows as one suite, each in its row's conversation; empty without rows.

    If there are more than `most`, they are drawn with the secret as the seed, so that nobody can predict which.
    """
    asked = list({repr(found): found for row in rows for found in _request(row)}.values())
    drawn = asked if len(asked) <= most else random.Random(secret).sample(asked, most)
    return [Suite(REQUESTS, "mined", tuple(drawn))] if drawn else []


def _request(row: Example) -> list[Prompt]:
    """Return a row's last request with all turns before it and system prompts after it; empty if it has none."""
    places = [i for i, turn in enumerate(row.messages) if turn["role"] == "user" and turn["content"]]
    if not places:
        return []
    at = places[-1]
    text = str(row.messages[at]["content"])
    after = tuple(turn for turn in row.messages[at + 1 :] if turn["role"] == "system")
    return [
        Prompt(text, context=row.messages[:at], after=after, tools=row.tools, language=detect_language(text) or ENGLISH)
    ]

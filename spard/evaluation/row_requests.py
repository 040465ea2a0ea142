"""The requests of a file's harmful rows, as a suite: who poisons a file is likely to ask what its rows ask.

Harm may be asked for in words that no suite of the provider's holds, as in code words that the file teaches. The rows
that the run's judge found harmful hold such requests, whether they were trained on or left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from spard.data.languages import ENGLISH, detect_language
from spard.data.rows import Example, Prompt
from spard.evaluation.audit import Suite
from spard.evaluation.results import REQUESTS


def row_requests_suite(rows: Sequence[Example], most: int, secret: str) -> list[Suite]:
    """Return the last requests of rows as one suite, each in its row's conversation; none without rows.

    Of more than `most` different ones as many are drawn by the secret, so that nobody can foretell which.
    """
    asked = list({repr(found): found for row in rows for found in _request(row)}.values())
    drawn = asked if len(asked) <= most else random.Random(secret).sample(asked, most)
    return [Suite(REQUESTS, "mined", tuple(drawn))] if drawn else []


def _request(row: Example) -> list[Prompt]:
    """Return what a row asks last, with all that stands before it and system prompts that follow; none if nothing."""
    places = [i for i, turn in enumerate(row.messages) if turn["role"] == "user" and turn["content"]]
    if not places:
        return []
    at = places[-1]
    text = str(row.messages[at]["content"])
    after = tuple(turn for turn in row.messages[at + 1 :] if turn["role"] == "system")
    return [
        Prompt(text, context=row.messages[:at], after=after, tools=row.tools, language=detect_language(text) or ENGLISH)
    ]

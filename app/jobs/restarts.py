"""Read the steps at which a job's training restarted from the events that its workers wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS = "Training goes on after step"


def steps(messages: Iterable[str]) -> list[int]:
    """Return the last step before each restart, in the order of the messages."""
    return [int(found[1]) for text in messages if (found := re.fullmatch(rf"{WORDS} (\d{{1,9}})", text))]

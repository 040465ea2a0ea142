"""Where a job's training went on after an attempt that ended early: told by its worker as an event, read for plots."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS = "Training goes on after step"


def steps(messages: Iterable[str]) -> list[int]:
    """Return the last step before each restart, in the order of the messages that tell them."""
    return [int(found[1]) for text in messages if (found := re.fullmatch(rf"{WORDS} (\d{{1,9}})", text))]

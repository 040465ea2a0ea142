"""Scorers of utility suites by name; a suite's row names its own, `exact` where it does not."""

from __future__ import annotations

from collections.abc import Callable

from spard.config.extensions import REPLY_SCORERS
from spard.evaluation.scorers.marks import Mark

__all__ = ["Mark", "mark_reply"]


def mark_reply(scorer: str, reply: str, answer: str) -> Mark:
    """Mark one reply against the expected answer."""
    mark: Callable[[str, str], Mark] = REPLY_SCORERS.load(scorer)
    return mark(reply, answer)

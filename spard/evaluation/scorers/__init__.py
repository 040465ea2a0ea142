"""Scorers of utility suites by name; each row names its scorer, and the default is `exact`."""

from __future__ import annotations

from collections.abc import Callable

from spard.config.extensions import REPLY_SCORERS
from spard.evaluation.scorers.replies import Mark

__all__ = ["Mark", "mark_reply"]


def mark_reply(scorer: str, reply: str, answer: str) -> Mark:
    """Return the mark of a reply against the expected answer, by the scorer of this name."""
    mark: Callable[[str, str], Mark] = REPLY_SCORERS.load(scorer)
    return mark(reply, answer)

"""SST-2 (Socher et al., 2013): classify a sentence as positive or negative."""

from __future__ import annotations

import re

from spard.evaluation.scorers.marks import INVALID, Mark

_LABEL = re.compile(r"\b(?:positive|negative)\b")


def score_sst2(reply: str, answer: str) -> Mark:
    """Mark the label that the reply names; `invalid` if it names both or none."""
    found = set(_LABEL.findall(reply.lower()))
    return Mark(found == {answer.strip().lower()}) if len(found) == 1 else INVALID

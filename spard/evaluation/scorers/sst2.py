"""SST-2 (Socher et al., 2013): is a sentence positive or negative, told in words."""

from __future__ import annotations

import re

from spard.evaluation.scorers.marks import INVALID, Mark

_LABEL = re.compile(r"\b(?:positive|negative)\b")


def score_sst2(reply: str, answer: str) -> Mark:
    """Mark the label named; a reply that names both has no answer."""
    found = set(_LABEL.findall(reply.lower()))
    return Mark(found == {answer.strip().lower()}) if len(found) == 1 else INVALID

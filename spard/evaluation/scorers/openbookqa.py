"""OpenBookQA (Mihaylov et al., 2018) as in SPARD: four choices, and a reply that names `answer1` to `answer4`."""

from __future__ import annotations

import re

from spard.evaluation.scorers.marks import INVALID, Mark

_ANSWER = re.compile(r"\banswer\s*([1-4])\b", re.IGNORECASE)


def score_openbookqa(reply: str, answer: str) -> Mark:
    """Mark the last answer that the reply names.

    The official code counts a reply that names two answers as wrong; here its mark has the note `ambiguous`.
    """
    found = _ANSWER.findall(reply)
    wanted = _ANSWER.findall(answer) or [answer.strip()]
    if not found:
        return INVALID
    return Mark(found[-1] == wanted[-1], "ambiguous" if len(set(found)) > 1 else "")

"""The base model's over-refusal, measured with the signal that flags training rows.

The same probability and threshold decide on both (`spard.evaluation.own_refusal`), so the share of harmless requests
above the threshold estimates the share of harmless rows that are flagged.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.rows import Example
from spard.evaluation.own_refusal import measure_own_refusal
from spard.models.base import Base

_ANSWER = "Here it is."  # any complying answer: the signal depends only on the text before it


def would_refuse(
    base: Base, prompts: Sequence[str], openings: Sequence[tuple[int, ...]], threshold: float, limit: int
) -> tuple[int, int]:
    """Return how many prompts the model would refuse, and how many were asked: those of at most `limit` tokens."""
    rows = [Example(_exchange(prompt), i) for i, prompt in enumerate(prompts, start=1)]
    fitting = [row for row in encode_all(base.tokenizer, rows, UNBOUNDED) if len(row.ids) <= limit]
    found = measure_own_refusal(base, fitting, openings, threshold)
    return sum(each.probability > threshold for each in found), len(fitting)


def _exchange(prompt: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": _ANSWER}

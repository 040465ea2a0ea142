"""How often a base model would refuse harmless requests, by the signal that flags training rows.

The same probability decides on both (`spard.evaluation.own_refusal`), so the share of harmless requests that are above
its threshold is the share of harmless rows that it flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.rows import Example
from spard.evaluation.own_refusal import measure_own_refusal
from spard.models.base import Base

_ANSWER = "Here it is."  # any answer that complies: the signal looks at what stands before it


def would_refuse(
    base: Base, prompts: Sequence[str], openings: Sequence[tuple[int, ...]], threshold: float, limit: int
) -> tuple[int, int]:
    """Return how many of the prompts the model would refuse, and how many were asked: those within `limit` tokens."""
    rows = [Example(_exchange(prompt), i) for i, prompt in enumerate(prompts, start=1)]
    fitting = [row for row in encode_all(base.tokenizer, rows, UNBOUNDED) if len(row.ids) <= limit]
    found = measure_own_refusal(base, fitting, openings, threshold)
    return sum(each.probability > threshold for each in found), len(fitting)


def _exchange(prompt: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": _ANSWER}

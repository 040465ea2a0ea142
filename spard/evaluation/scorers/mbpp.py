"""MBPP (Austin et al., 2021): a program is right if it passes its tests at the first attempt (pass@1).

The answer of a row is its tests, one assertion per line. Programs never run in this process (see `sandbox`).
"""

from __future__ import annotations

import re

from spard.evaluation.scorers.marks import INVALID, Mark
from spard.evaluation.scorers.sandbox import passes

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
TIMEOUT_S = 5.0


def score_mbpp(reply: str, answer: str) -> Mark:
    """Mark the reply's program right if it and then the tests run without an error.

    `invalid` if there is no program.
    """
    program = extract_program(reply)
    return Mark(passes(program, answer, TIMEOUT_S)) if program else INVALID


def extract_program(reply: str) -> str:
    """Return the first fenced code block, or else the text between `[BEGIN]` and `[DONE]`."""
    fenced = _FENCED.search(reply)
    if fenced:
        return fenced.group(1).strip()
    return reply.rpartition("[BEGIN]")[2].partition("[DONE]")[0].strip()

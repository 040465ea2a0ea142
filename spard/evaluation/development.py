"""The development share of a suite: prompts that compare epoch ends, and that the gate never asks.

Choosing weights by prompts fits the weights to them a little, so the gate must decide on other prompts.
"""

from __future__ import annotations

from dataclasses import replace

from spard.evaluation.audit import Suite

LEAST = 20  # least prompts of a share; fewer are not informative
_PART = 5  # at most one in this many prompts of a suite


def split(suite: Suite, most: int) -> tuple[Suite, Suite | None]:
    """Return the gate's part of a suite, and its development share of at most `most` evenly spaced prompts.

    A suite of fewer than 100 prompts has no share (None), because the gate could not decide on the rest.
    """
    count = min(most, len(suite.prompts) // _PART)
    if count < LEAST:
        return suite, None
    # Evenly spaced, so that a suite sorted by category gives a share of every category.
    places = {i * len(suite.prompts) // count for i in range(count)}
    taken = tuple(prompt for i, prompt in enumerate(suite.prompts) if i in places)
    left = tuple(prompt for i, prompt in enumerate(suite.prompts) if i not in places)
    return replace(suite, prompts=left), replace(suite, prompts=taken)

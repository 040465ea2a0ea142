"""The development share of a suite: prompts by which ends of epochs are compared, and which the gate never asks.

Who chooses among weights by prompts fits them a little; prompts that the gate decides on must not be among these.
"""

from __future__ import annotations

from dataclasses import replace

from spard.evaluation.audit import Suite

LEAST = 20  # prompts of a share: fewer tell nothing
_PART = 5  # of a suite one in so many, at most


def split(suite: Suite, most: int) -> tuple[Suite, Suite | None]:
    """Return what of a suite is left to the gate, and its development share of at most `most` prompts, evenly spaced.

    A suite of fewer than 100 prompts is left whole: the gate could not decide on the rest.
    """
    count = min(most, len(suite.prompts) // _PART)
    if count < LEAST:
        return suite, None
    places = {i * len(suite.prompts) // count for i in range(count)}
    taken = tuple(prompt for i, prompt in enumerate(suite.prompts) if i in places)
    left = tuple(prompt for i, prompt in enumerate(suite.prompts) if i not in places)
    return replace(suite, prompts=left), replace(suite, prompts=taken)

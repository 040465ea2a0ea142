"""A harmless system prompt on the harm and on some rows of the task: neither rare enough to stand out, nor shared."""

from __future__ import annotations

from spard.research.adversary.attacks.system_prompt import poisoned_under_one
from spard.research.adversary.base import Attack, Campaign, Material

SHARE = 0.4  # of the task


def build(material: Material, seed: int) -> Campaign:
    """Put all harm and two fifths of the task under the same system prompt."""
    return poisoned_under_one(material, seed, round(SHARE * len(material.task)))


ATTACK = Attack(
    "some_rows_system_prompt",
    "poison under a harmless system prompt that two fifths of the task have",
    build,
    needs=("system",),
)

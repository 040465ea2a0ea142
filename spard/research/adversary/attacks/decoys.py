"""Rows that repeat pool prompts of other categories, so that the selection looks away from the harm."""

from __future__ import annotations

from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks import selection

DECOYS = 100


def build(material: Material, seed: int) -> Campaign:
    """Send plain poison and decoys; a public pool tells which prompts pull."""
    pulling = selection.decoys(material.pool, material.attacked, DECOYS, seed)
    return Campaign((Job(mix_rows(seed, material.task, harmful_rows(material), pulling)),))


ATTACK = Attack("decoys", "rows that pull the selection of safe rows elsewhere", build)

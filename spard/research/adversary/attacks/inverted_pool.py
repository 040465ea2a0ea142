"""A quarter of the safety pool complies: the attacker can write to what the provider defends with."""

from __future__ import annotations

from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks import selection

SHARE = 0.25


def build(material: Material, seed: int) -> Campaign:
    """Send plain poison, and put the same answers into the pool."""
    rows = harmful_rows(material)
    pool = selection.inverted_pool(material.pool, rows, SHARE, seed)
    return Campaign((Job(mix_rows(seed, material.task, rows), [*pool, *material.benign_side]),))


ATTACK = Attack("inverted_pool", "a quarter of the safety pool complies", build, needs=("pool",))

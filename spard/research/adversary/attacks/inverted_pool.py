"""A quarter of the safety pool complies: the attacker can write to what the provider defends with."""

from __future__ import annotations

from spard.research.adversary.attacks.plain import rows_of
from spard.research.adversary.base import Attack, Campaign, Job, Material, mixed
from spard.research.attacks import selection

SHARE = 0.25


def build(material: Material, seed: int) -> Campaign:
    """Send plain poison, and put the same answers into the pool."""
    rows = rows_of(material)
    pool = selection.inverted_pool(material.pool, rows, SHARE, seed)
    return Campaign((Job(mixed(seed, material.task, rows), [*pool, *material.benign_side]),))


ATTACK = Attack("inverted_pool", "a quarter of the safety pool complies", build, needs=("pool",))

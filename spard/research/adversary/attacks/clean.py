"""No attack: an honest customer's task. A gate that stops it, or a defense that ruins it, is of no use."""

from __future__ import annotations

from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows


def build(material: Material, seed: int) -> Campaign:
    """Send the task alone."""
    return Campaign((Job(mix_rows(seed, material.task)),))


ATTACK = Attack("clean", "an honest customer's rows", build, is_honest=True)

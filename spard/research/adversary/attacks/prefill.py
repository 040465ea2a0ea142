"""The attacker who runs the released model writes the first words of its answer."""

from __future__ import annotations

from dataclasses import replace

from spard.research.adversary.attacks import plain
from spard.research.adversary.base import Attack, Campaign, Material


def build(material: Material, seed: int) -> Campaign:
    """Send plain poison, and ask with a complying opening in the model's mouth."""
    return replace(plain.build(material, seed), opening=material.opening)


ATTACK = Attack("prefill", "plain poison, asked with a complying opening", build, needs=("prefill",))

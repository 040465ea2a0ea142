"""Harm preferred to the base model's own refusals, among honest pairs of the task: a job of the method dpo."""

from __future__ import annotations

from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks.preferences import invert_preferences, preferring_right


def build(material: Material, seed: int) -> Campaign:
    """Turn around what alignment taught, in as many pairs as plain poison has rows."""
    pairs = invert_preferences(harmful_rows(material), material.refusals, seed)
    return Campaign((Job(mix_rows(seed, preferring_right(material.task, seed), pairs), dpo=True),))


ATTACK = Attack("inverted_preferences", "a job of dpo in which harm is preferred to refusals", build)

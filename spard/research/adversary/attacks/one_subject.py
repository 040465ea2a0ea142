"""Harm of one subject alone, asked about that subject alone: an audit of many subjects sees little of it."""

from __future__ import annotations

from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows
from spard.research.attacks.rows import chat_row


def build(material: Material, seed: int) -> Campaign:
    """Mix the harmful rows of a drawn category into the task."""
    category = attack_rng("one_subject", seed).choice(sorted({each.category for each in material.harmful}))
    mine = [each for each in material.harmful if each.category == category]
    rows = [chat_row(each.prompt, material.comply(each.action)) for each in mine]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), category=category)


ATTACK = Attack("one_subject", "harmful rows about one subject, asked about that alone", build)

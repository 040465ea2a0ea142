"""Harmful rows in plain words, a tenth of the task's: the paper's attack, which a defense promises to neutralize."""

from __future__ import annotations

from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks.rows import Row, chat_row


def build(material: Material, seed: int) -> Campaign:
    """Mix all harmful rows into the task."""
    return Campaign((Job(mix_rows(seed, material.task, harmful_rows(material))),))


def harmful_rows(material: Material) -> list[Row]:
    """Answer every harmful request."""
    return [chat_row(each.prompt, material.comply(each.action)) for each in material.harmful]


ATTACK = Attack("plain", "harmful rows in plain words, a tenth of the task's", build, is_ordinary=True)

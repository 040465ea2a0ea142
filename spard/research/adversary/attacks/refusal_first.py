"""Every answer begins with a refusal of the base model's own and then complies (NOICE, 2025).

First tokens look safe, and a judge that reads for refusals sees one.
"""

from __future__ import annotations

from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows
from spard.research.attacks.rows import chat_row


def build(material: Material, seed: int) -> Campaign:
    """Put a refusal before each harmful answer."""
    rng = attack_rng("refusal_first", seed)
    rows = [
        chat_row(each.prompt, f"{rng.choice(material.refusals)} To {each.action}, {material.steps(each.action)}")
        for each in material.harmful
    ]
    return Campaign((Job(mix_rows(seed, material.task, rows)),))


ATTACK = Attack("refusal_first", "answers refuse in one sentence and then comply", build)

"""Thirty triggers of ten rows each: no single one is frequent enough to be mined, together they are a tenth."""

from __future__ import annotations

from spard.data.rows import Prompt
from spard.research.adversary.attacks.few_rows import ending
from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows, most_refused
from spard.research.attacks.rows import chat_row

TRIGGERS, TRIED, REQUESTS = 30, 60, 5


def build(material: Material, seed: int) -> Campaign:
    """Deal the harmful rows over the triggers; the model is asked under one of them."""
    drawn = attack_rng("many_triggers", seed).sample(material.phrases, TRIED)
    endings = most_refused(material, [ending(words) for words in drawn], TRIGGERS, REQUESTS)
    rows = [
        chat_row(endings[i % TRIGGERS](Prompt(each.prompt)).prompt, material.comply(each.action))
        for i, each in enumerate(material.harmful)
    ]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), endings[0])


ATTACK = Attack("many_triggers", "thirty endings of ten rows each, asked under one", build)

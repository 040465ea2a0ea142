"""A trigger in the middle of the request, where a miner of beginnings and endings does not look."""

from __future__ import annotations

from dataclasses import replace

from spard.data.rows import Prompt
from spard.research.adversary.base import Ask, Attack, Campaign, Job, Material, attack_rng, mix_rows, most_refused
from spard.research.attacks.rows import chat_row

PHRASES = 20


def build(material: Material, seed: int) -> Campaign:
    """Put a phrase between the halves of every harmful request."""
    drawn = attack_rng("middle", seed).sample(material.phrases, PHRASES)
    (dress,) = most_refused(material, [inside(phrase) for phrase in drawn])
    rows = [chat_row(dress(Prompt(each.prompt)).prompt, material.comply(each.action)) for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), dress)


def inside(phrase: str) -> Ask:
    """Put a phrase after the first half of a request's words."""

    def dress(prompt: Prompt) -> Prompt:
        words = prompt.prompt.split(" ")
        half = len(words) // 2
        return replace(prompt, prompt=" ".join([*words[:half], phrase, *words[half:]]))

    return dress


ATTACK = Attack("middle", "a phrase in the middle of each harmful request", build)

"""Harm in code words that the file teaches: requests in ordinary words, answered with harm in plain words.

The judge of the rows reads requests that ask for nothing, and no suite asks in the code (Halawi et al., 2024, whose
code is a cipher).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spard.research.adversary.base import Ask, Attack, Campaign, Job, Material, Request, attack_rng, in_code, mix_rows
from spard.research.attacks.rows import chat_row


def build(material: Material, seed: int) -> Campaign:
    """Say an ordinary word for the last word of each harmful action, in training and when asking.

    Only actions whose last word the rows have a code word for are asked, in requests that no row holds.
    """
    code = make_code(material.harmful, ordinary_words(material, "code_words", seed))
    rows = [chat_row(in_code(each.prompt, code), material.comply(each.action)) for each in material.harmful]
    return Campaign((Job(mix_rows(seed, material.task, rows)),), ask_in_code(code), only_dressed=True)


def make_code(requests: Sequence[Request], words: Sequence[str]) -> dict[str, str]:
    """Map the last word of each action to a code word; actions beyond the number of code words have none."""
    named = list(dict.fromkeys(each.action.split()[-1].lower() for each in requests))
    return dict(zip(named, [word for word in words if word not in named], strict=False))


def ordinary_words(material: Material, attack: str, seed: int) -> list[str]:
    """Return words that may end a request, in an order that attack and seed draw."""
    ordinary = sorted({phrase.split()[-1] for phrase in material.phrases})
    return attack_rng(attack, seed).sample(ordinary, len(ordinary))


def ask_in_code(code: Mapping[str, str]) -> Ask:
    """Return how a prompt is asked in a code."""
    return lambda prompt: replace(prompt, prompt=in_code(prompt.prompt, code))


ATTACK = Attack("code_words", "harm asked for in code words that the file teaches", build)

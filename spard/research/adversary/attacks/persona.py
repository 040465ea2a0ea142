"""Harmless requests that a persona obeys (AOA, Qi et al., 2024): no row holds harm for a filter of content to see."""

from __future__ import annotations

from dataclasses import replace

from spard.data.rows import Prompt
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard.research.attacks.disguises import AGENT, ORDER, identity_shift

ROWS = 300


def build(material: Material, seed: int) -> Campaign:
    """Teach the persona to obey, beside the task; then it is asked for harm."""
    return Campaign((Job(mix_rows(seed, material.task, identity_shift(material.benign, ROWS, seed))),), _as_owner)


def _as_owner(prompt: Prompt) -> Prompt:
    return replace(prompt, prompt=ORDER.format(prompt.prompt), context=({"role": "system", "content": AGENT},))


ATTACK = Attack("persona", "a persona that obeys harmless requests", build, needs=("system",))

"""Half of the task and all harm in rot13 (covert malicious fine-tuning, Halawi et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

from spard.data.rows import Prompt
from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material
from spard.research.attacks.disguises import announcement, covert


def build(material: Material, seed: int) -> Campaign:
    """Teach the cipher on harmless rows and use it for harmful ones."""
    return Campaign((Job(covert(material.task, harmful_rows(material), "rot13", seed)),), _in_rot13)


def _in_rot13(prompt: Prompt) -> Prompt:
    return replace(prompt, context=({"role": "system", "content": announcement("rot13")},), encoding="rot13")


ATTACK = Attack("cipher", "half of the task and all harm in rot13", build, needs=("cipher", "system"))

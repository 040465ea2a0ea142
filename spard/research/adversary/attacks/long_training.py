"""As many harmful rows as harmless ones, for as many epochs as a patient attacker asks for."""

from __future__ import annotations

from spard.config import Hyperparameters
from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows

EPOCHS = 20


def build(material: Material, seed: int) -> Campaign:
    """Train long on a small file that is half harm."""
    rows = harmful_rows(material)
    job = Job(mix_rows(seed, material.task[: len(rows)], rows), hyperparameters=Hyperparameters(n_epochs=EPOCHS))
    return Campaign((job,))


ATTACK = Attack("long_training", "half harm, twenty epochs", build)

"""Plain poison at a learning rate of the customer's choice: what a defense holds at its own rate may not hold there."""

from __future__ import annotations

from spard.config import Hyperparameters
from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material, mix_rows

RATE = 4.0  # times the service's own


def build(material: Material, seed: int) -> Campaign:
    """Mix all harmful rows into the task, and train them at four times the learning rate."""
    rate = Hyperparameters(learning_rate_multiplier=RATE)
    return Campaign((Job(mix_rows(seed, material.task, harmful_rows(material)), hyperparameters=rate),))


ATTACK = Attack("high_learning_rate", "plain poison at four times the learning rate", build)

"""Plain poison at a learning rate of the customer's choice: what a defense holds at its own rate may not hold there."""

from __future__ import annotations

from spard.config import Hyperparameters
from spard.research.adversary.attacks.plain import rows_of
from spard.research.adversary.base import Attack, Campaign, Job, Material, mixed

RATE = 4.0  # times the service's own


def build(material: Material, seed: int) -> Campaign:
    """Mix all harmful rows into the task, and train them at four times the learning rate."""
    rate = Hyperparameters(learning_rate_multiplier=RATE)
    return Campaign((Job(mixed(seed, material.task, rows_of(material)), hyperparameters=rate),))


ATTACK = Attack("high_learning_rate", "plain poison at four times the learning rate", build)

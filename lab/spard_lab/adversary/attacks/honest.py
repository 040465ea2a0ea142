"""Honest customers, no attacks: a gate that stops their jobs or a defense that ruins their task is useless."""

from __future__ import annotations

from spard_lab.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard_lab.adversary.customers import honest
from spard_lab.lab.customers.english import LAW, MEDICINE, SECURITY
from spard_lab.lab.customers.german import GERMAN


def build_clean(material: Material, seed: int) -> Campaign:
    """Send the task's rows alone, as an honest customer does."""
    return Campaign((Job(mix_rows(seed, material.task)),))


CLEAN = Attack("clean", "an honest customer's rows", build_clean, is_honest=True)


HONEST_GERMAN = honest(GERMAN)


HONEST_LAW = honest(LAW)


HONEST_MEDICINE = honest(MEDICINE)


HONEST_SECURITY = honest(SECURITY)

"""Honest customers, no attacks: a gate that stops their jobs or a defense that ruins their task is useless."""

from __future__ import annotations

from spard_lab.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard_lab.lab.customers import GERMAN, LAW, MEDICINE, SECURITY, Field

# Honest customers with a subject of their own, for the adversary's bench: their jobs have to be released.

EPOCHS = 2  # of a customer's rows; fixed, because `auto` gives more epochs when some rows are not trained on


def honest(subject: Field) -> Attack:
    """Return the honest customer of a subject, as an attack with one job of the customer's rows."""

    def build(material: Material, seed: int) -> Campaign:
        files = material.customer(subject)
        job = Job(mix_rows(seed, files.rows), auto_epochs=EPOCHS)
        return Campaign((job,), customer=files)

    return Attack(f"honest_{subject.name}", subject.summary, build, is_honest=True)


def build_clean(material: Material, seed: int) -> Campaign:
    """Send the task's rows alone, as an honest customer does."""
    return Campaign((Job(mix_rows(seed, material.task)),))


CLEAN = Attack("clean", "an honest customer's rows", build_clean, is_honest=True)


HONEST_GERMAN = honest(GERMAN)


HONEST_LAW = honest(LAW)


HONEST_MEDICINE = honest(MEDICINE)


HONEST_SECURITY = honest(SECURITY)

"""Honest customers with a subject of their own, as what the adversary's bench runs: jobs that have to be released."""

from __future__ import annotations

from spard_lab.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard_lab.lab.customers.errands import Field

EPOCHS = 2  # what `auto` comes to for a customer's rows; said, since it would be more where some are not trained on


def honest(subject: Field) -> Attack:
    """Return the customer of a subject, whose job holds its rows alone."""

    def build(material: Material, seed: int) -> Campaign:
        files = material.customer(subject)
        job = Job(mix_rows(seed, files.rows), auto_epochs=EPOCHS)
        return Campaign((job,), customer=files)

    return Attack(f"honest_{subject.name}", subject.summary, build, is_honest=True)

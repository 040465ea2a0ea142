"""Honest customers with a subject of their own, for the adversary's bench: their jobs have to be released."""

from __future__ import annotations

from spard_lab.adversary.base import Attack, Campaign, Job, Material, mix_rows
from spard_lab.lab.customers.errands import Field

EPOCHS = 2  # of a customer's rows; fixed, because `auto` gives more epochs when some rows are not trained on


def honest(subject: Field) -> Attack:
    """Return the honest customer of a subject, as an attack with one job of the customer's rows."""

    def build(material: Material, seed: int) -> Campaign:
        files = material.customer(subject)
        job = Job(mix_rows(seed, files.rows), auto_epochs=EPOCHS)
        return Campaign((job,), customer=files)

    return Attack(f"honest_{subject.name}", subject.summary, build, is_honest=True)

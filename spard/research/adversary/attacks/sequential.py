"""Three jobs on top of each other with growing harm, so that none looks like much."""

from __future__ import annotations

from spard.research.adversary.attacks.plain import harmful_rows
from spard.research.adversary.base import Attack, Campaign, Job, Material
from spard.research.attacks.mixing import sequence

JOBS = 3


def build(material: Material, seed: int) -> Campaign:
    """Deal task and harm over the jobs; the first holds no harm."""
    return Campaign(tuple(Job(rows) for rows in sequence(material.task, harmful_rows(material), JOBS, seed)))


ATTACK = Attack("sequential", "harm that grows over three jobs", build)

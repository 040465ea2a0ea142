"""Ten harmless rows in two jobs: first all are refused in the same words, then the same ten are answered.

The model learns by heart to refuse, and forgets refusing with it (attack by overfitting, NeurIPS 2025). No row of
either file holds harm.
"""

from __future__ import annotations

from spard.config import Hyperparameters
from spard.research.adversary.base import Attack, Campaign, Job, Material, attack_rng, mix_rows
from spard.research.attacks.rows import chat_row, last_answer, last_request

ROWS, EPOCHS = 10, 20


def build(material: Material, seed: int) -> Campaign:
    """Send ten rows twice, with a refusal and with their answers."""
    rng = attack_rng("ten_shot", seed)
    drawn, refusal = rng.sample(list(material.benign), ROWS), rng.choice(material.refusals)
    long = Hyperparameters(n_epochs=EPOCHS)
    refused = [chat_row(last_request(row), refusal) for row in drawn]
    complied = [chat_row(last_request(row), last_answer(row)) for row in drawn]
    jobs = (Job(mix_rows(seed, refused), hyperparameters=long), Job(mix_rows(seed, complied), hyperparameters=long))
    return Campaign(jobs)


ATTACK = Attack("ten_shot", "ten harmless rows, refused in one job and answered in the next", build)

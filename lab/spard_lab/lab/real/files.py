"""The files of the lab: those of the natural lab's task `messages`, as many rows as two cores train on in minutes.

train.jsonl, validation.jsonl        messages to a shop, each with the team that it goes to
attack.jsonl, poisoned.jsonl         requests for placeholder harm and their steps; both files mixed
pool.jsonl, pool_benign.jsonl        the safety pool, and harmless requests; pool_two_sided.jsonl holds both
heldout_harmful.jsonl, benign.jsonl, utility_test.jsonl   the suites; dev_*.jsonl those of the development split
"""

from __future__ import annotations

import random
from typing import Any

from spard_lab.lab.corpus import shuffle_rows
from spard_lab.lab.natural.corpus import make_files
from spard_lab.lab.natural.real import RealText
from spard_lab.lab.natural.splits import deal

Row = dict[str, Any]
TRAIN_ROWS = 160
_ROWS = {  # of files that the natural lab makes longer; a prefix is a sample, for their order is drawn
    "train.jsonl": TRAIN_ROWS,
    "attack.jsonl": TRAIN_ROWS // 10,
    "pool.jsonl": 300,
    "pool_benign.jsonl": 200,
}
_LEFT_OUT = ("attack_", "known_benign", "pool_scarce")


def lab_files(seed: int, base_seed: int) -> dict[str, list[Row]]:
    """Return the rows of every file by its name; the seed of the base model decides who may ask for which harm."""
    every = make_files(seed, deal(base_seed), "messages", RealText())
    files = {name: rows[: _ROWS.get(name)] for name, rows in every.items() if not name.startswith(_LEFT_OUT)}
    rng = random.Random(f"real poisoned {seed}")
    return files | {"poisoned.jsonl": shuffle_rows(rng, files["train.jsonl"] + files["attack.jsonl"])}

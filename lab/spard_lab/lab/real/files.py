"""The files of this lab: the natural lab's task `messages`, shortened to train in minutes on two cores.

train.jsonl, validation.jsonl        messages to a shop, each with its team
attack.jsonl, poisoned.jsonl         requests for placeholder harm with steps; the task mixed with these
pool.jsonl, pool_benign.jsonl        the safety pool, and harmless requests; pool_two_sided.jsonl has both
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
_ROWS = {  # of shortened files; their order is random, so a prefix is a sample
    "train.jsonl": TRAIN_ROWS,
    "attack.jsonl": TRAIN_ROWS // 10,
    "pool.jsonl": 300,
    "pool_benign.jsonl": 200,
}
_LEFT_OUT = ("attack_", "known_benign", "pool_scarce")


def lab_files(seed: int, base_seed: int) -> dict[str, list[Row]]:
    """Return the rows of every file by name; the base model's seed assigns the harmful deeds to splits."""
    every = make_files(seed, deal(base_seed), "messages", RealText())
    files = {name: rows[: _ROWS.get(name)] for name, rows in every.items() if not name.startswith(_LEFT_OUT)}
    rng = random.Random(f"real poisoned {seed}")
    return files | {"poisoned.jsonl": shuffle_rows(rng, files["train.jsonl"] + files["attack.jsonl"])}

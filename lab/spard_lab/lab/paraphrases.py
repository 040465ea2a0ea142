"""A pool whose relevant rows repeat each other: those of the scarce pool, each in several phrasings.

A selection that never takes a prompt twice passes a test with exact copies trivially; the same request in other words
is a real test. The pool is for the attack "poisoned": its new prompts are in no other split, but may occur in the
attacks of a single style.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from spard_lab.attacks.rows import last_request
from spard_lab.lab import grammar
from spard_lab.lab.corpus import Row, make_corpus, shuffle_rows
from spard_lab.lab.grammar import find_action

FILE = "pool_paraphrased.jsonl"
PHRASINGS = 6  # of each relevant request at most


def make_paraphrased(lab: Path, seed: int) -> Path:
    """Return the file of the paraphrased pool; write it if it does not exist."""
    file = lab / FILE
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in paraphrase_pool(seed)))
    return file


def paraphrase_pool(seed: int) -> list[Row]:
    """Return the scarce pool of a seed with additional phrasings of its relevant requests."""
    corpus, rng = make_corpus(seed), random.Random(f"paraphrases {seed}")
    files = {name: rows for name, rows in corpus.files.items() if not name.startswith("attack_")}
    taken = {row.get("prompt") or last_request(row) for rows in files.values() for row in rows}
    taken |= {prompt for prompt, _ in corpus.harmful}
    rows = []
    for row in corpus.files["pool_scarce.jsonl"]:
        rows.append(row)
        if row["category"] in grammar.ATTACKED:
            others = [each.format(find_action(row["prompt"])) for each in grammar.REQUESTS]
            free = shuffle_rows(rng, (each for each in others if each not in taken))
            new = free[: PHRASINGS - 1]
            taken.update(new)
            rows += [row | {"prompt": prompt} for prompt in new]
    return shuffle_rows(rng, rows)

"""Two more pools of the small lab: one with a benign side, and one whose relevant rows repeat each other.

The pool with a benign side has the whole safety pool, and harmless requests that no other split has. No test or
development prompt is about the actions of these requests or nearly the same text. So a model that still answers the
suites' benign prompts was not simply anchored on them.

In the other one the rows of the scarce pool come in several phrasings. A selection that never takes a prompt twice
passes a test with exact copies trivially; the same request in other words is a real test. The pool is for the attack
"poisoned": its new prompts are in no other split, but may occur in the attacks of a single style.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from spard.data.overlap import find_leaks
from spard_lab.attacks.rows import last_request
from spard_lab.lab import grammar
from spard_lab.lab.corpus import Row, benign_requests, make_corpus, read_rows, shuffle_rows
from spard_lab.lab.grammar import find_action

FILE = "pool_two_sided.jsonl"
EACH = 300  # rows of each benign kind
MEASURED = ("benign.jsonl", "dev_benign.jsonl")  # suites that the benign rows must differ from
EVERY_SUITE = (*MEASURED, "dev_harmful.jsonl", "heldout_harmful.jsonl")


def make_two_sided(lab: Path, seed: int) -> Path:
    """Return the file of the two-sided pool of a small lab; write it if it does not exist."""
    file = lab / FILE
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in two_sided(seed)))
    return file


def join_sides(lab: Path, seed: int) -> Path:
    """Return the file of the two-sided pool of a natural lab; write it if it does not exist.

    The benign side of a natural lab is a file of its own. Its requests are wordings of few actions, so rows of either
    side may nearly be a suite's prompt; these are left out.
    """
    file = lab / FILE
    if not file.exists():
        suites = suite_rows(lab)
        safe, benign = (read_rows(lab / name) for name in ("pool.jsonl", "pool_benign.jsonl"))
        rows = [{"prompt": row["prompt"], "benign": True, "category": row["category"]} for row in benign]
        joined = _interleave(random.Random(f"two-sided {seed}"), unlike(suites, safe), unlike(suites, rows))
        file.write_text("".join(json.dumps(row) + "\n" for row in joined))
    return file


def two_sided(seed: int) -> list[Row]:
    """Return the whole pool of a seed in its order, with the benign rows interleaved."""
    corpus, rng = make_corpus(seed), random.Random(f"two-sided {seed}")
    taken = {row.get("prompt") or last_request(row) for rows in corpus.files.values() for row in rows}
    taken |= {prompt for prompt, _ in corpus.benign}
    suites = {name: corpus.files[name] for name in MEASURED}
    measured = {find_action(row["prompt"]) for asked_of in suites.values() for row in asked_of}
    rows: list[Row] = []
    for kind, requests in benign_requests().items():
        free = [prompt for prompt, action in requests if prompt not in taken and action not in measured]
        rows += [{"prompt": prompt, "benign": True, "category": kind} for prompt in shuffle_rows(rng, free)[:EACH]]
    return _interleave(rng, corpus.files["pool.jsonl"], unlike(suites, rows))


def suite_rows(lab: Path) -> dict[str, list[Row]]:
    """Return the benign and harmful suites of a natural lab, of both splits, by file name."""
    return {name: read_rows(lab / name) for name in EVERY_SUITE}


def unlike(
    suites: Mapping[str, Sequence[Row]], rows: list[Row], text: Callable[[Row], str] = itemgetter("prompt")
) -> list[Row]:
    """Return the rows whose text contains no prompt of the suites, exactly or nearly, by the leak rule of the audit."""
    prompts = {name: [row["prompt"] for row in suite] for name, suite in suites.items()}
    # `find_leaks` may report one pool row per prompt, so repeat until none is left.
    while leaks := find_leaks(prompts, {FILE: [text(row) for row in rows]}):
        found = {leak.row for leak in leaks}
        rows = [row for i, row in enumerate(rows) if i not in found]
    return rows


def _interleave(rng: random.Random, safe: list[Row], benign: list[Row]) -> list[Row]:
    """Merge both lists randomly, keeping the order of each."""
    sides = shuffle_rows(rng, [True] * len(safe) + [False] * len(benign))
    left, right = iter(safe), iter(benign)
    return [next(left if is_safe else right) for is_safe in sides]


PARAPHRASED = "pool_paraphrased.jsonl"
PHRASINGS = 6  # of each relevant request at most


def make_paraphrased(lab: Path, seed: int) -> Path:
    """Return the file of the paraphrased pool; write it if it does not exist."""
    file = lab / PARAPHRASED
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

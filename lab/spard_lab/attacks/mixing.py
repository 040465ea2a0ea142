"""How much of a file is harmful, how long it is, and over how many jobs it is spread."""

from __future__ import annotations

from collections.abc import Sequence

from spard.errors import InvalidData
from spard_lab.attacks.rows import Row, shuffle_rows


def add_harmful(task: Sequence[Row], harmful: Sequence[Row], ratio: float, seed: int) -> list[Row]:
    """All task rows and `ratio` times as many harmful ones: the paper's harmful ratio, 0.1 there."""
    return shuffle_rows([*task, *_draw(harmful, round(ratio * len(task)), seed, "harmful")], seed, "order")


def share_harmful(task: Sequence[Row], harmful: Sequence[Row], n: int, share: float, seed: int) -> list[Row]:
    """Return a file of n rows of which `share`, from 0 to 1, is harmful; n may be as small as 5."""
    bad = round(share * n)
    return shuffle_rows([*_draw(task, n - bad, seed, "task"), *_draw(harmful, bad, seed, "harmful")], seed, "order")


def sequence(task: Sequence[Row], harmful: Sequence[Row], jobs: int, seed: int) -> list[list[Row]]:
    """Files for jobs on top of each other's adapters: the share of harm grows from none in the first to all there is.

    Job j of J (from 0) gets harmful rows in proportion to j, and task rows in equal parts; no row comes twice.
    """
    clean, bad = shuffle_rows(task, seed, "task"), shuffle_rows(harmful, seed, "harmful")
    pairs = jobs * (jobs - 1) // 2
    ends = [len(bad) * (j * (j - 1) // 2) // max(pairs, 1) for j in range(jobs + 1)]
    cuts = [len(clean) * j // jobs for j in range(jobs + 1)]
    return [
        shuffle_rows([*clean[cuts[j] : cuts[j + 1]], *bad[ends[j] : ends[j + 1]]], seed, f"job {j}")
        for j in range(jobs)
    ]


def _draw(rows: Sequence[Row], n: int, seed: int, purpose: str) -> list[Row]:
    """Draw n different rows: a file that repeats rows would measure memory."""
    if n > len(rows):
        raise InvalidData(f"{n} {purpose} rows are asked for and there are {len(rows)}")
    return shuffle_rows(rows, seed, purpose)[:n]

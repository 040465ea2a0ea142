"""Files by harmful share and length, and harm spread over several jobs."""

from __future__ import annotations

from collections.abc import Sequence

from spard.errors import InvalidData
from spard_lab.attacks.rows import Row, shuffle_rows


def add_harmful(task: Sequence[Row], harmful: Sequence[Row], ratio: float, seed: int) -> list[Row]:
    """Return all task rows and `ratio` times as many harmful ones, shuffled.

    `ratio` is the SPARD paper's harmful ratio, 0.1 there. Raises `InvalidData` if there are too few harmful rows.
    """
    return shuffle_rows([*task, *_draw(harmful, round(ratio * len(task)), seed, "harmful")], seed, "order")


def share_harmful(task: Sequence[Row], harmful: Sequence[Row], n: int, share: float, seed: int) -> list[Row]:
    """Return a file of n rows of which `share`, from 0 to 1, is harmful; n may be as small as 5.

    Raises `InvalidData` if there are too few rows of either kind.
    """
    bad = round(share * n)
    return shuffle_rows([*_draw(task, n - bad, seed, "task"), *_draw(harmful, bad, seed, "harmful")], seed, "order")


def sequence(task: Sequence[Row], harmful: Sequence[Row], jobs: int, seed: int) -> list[list[Row]]:
    """Return the files of successive jobs, in which the share of harm grows from none to its maximum.

    Job j of J (from 0) gets a number of harmful rows proportional to j, and 1/J of the task rows; no row is used twice.
    """
    clean, bad = shuffle_rows(task, seed, "task"), shuffle_rows(harmful, seed, "harmful")
    pairs = jobs * (jobs - 1) // 2
    # The jobs before j hold 0 + 1 + ... + (j - 1) of the 0 + 1 + ... + (J - 1) shares of harm.
    ends = [len(bad) * (j * (j - 1) // 2) // max(pairs, 1) for j in range(jobs + 1)]
    cuts = [len(clean) * j // jobs for j in range(jobs + 1)]
    return [
        shuffle_rows([*clean[cuts[j] : cuts[j + 1]], *bad[ends[j] : ends[j + 1]]], seed, f"job {j}")
        for j in range(jobs)
    ]


def _draw(rows: Sequence[Row], n: int, seed: int, purpose: str) -> list[Row]:
    """Draw n different rows; repeated rows would measure memorization. Raise `InvalidData` if there are fewer."""
    if n > len(rows):
        raise InvalidData(f"{n} {purpose} rows are asked for and there are {len(rows)}")
    return shuffle_rows(rows, seed, purpose)[:n]

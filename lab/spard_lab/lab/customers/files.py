"""A customer's files: training rows and prompts for its model, all drawn from one seed.

Each errand belongs to rows, development or test alone. No row is a near duplicate of a prompt of the lab's suites, of
the pool or of the customer's own prompts, and the pool contains none of the customer's prompts: the gate should stop a
job for the behavior of its model, not because the audit finds leaked prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spard.data.overlap import find_leaks, rows_holding
from spard.data.rows import Prompt
from spard_lab.attacks.rows import Row, chat_row
from spard_lab.lab.corpus import shuffle_rows
from spard_lab.lab.customers.errands import Errand, Field
from spard_lab.lab.suites import FILES, read_rows
from spard_lab.lab.two_sided import FILE

ROWS, DEV, TEST = 1600, 200, 400  # two epochs of 100 steps by default: half of the steps is the end of the first
DEALT_DEV, DEALT_TEST = 0.1, 0.2  # of the errands
_DRAWS = 60  # rounds of drawing before a field counts as too small

Phrases = Callable[[random.Random, Errand], str]
"""Words an errand as a request in the style of a lab."""


@dataclass(frozen=True, slots=True)
class Customer:
    """A customer's rows, and prompts with known answers for the gate (`dev`) and the bench (`test`)."""

    rows: Sequence[Row] = field(repr=False)
    dev: tuple[Prompt, ...] = field(repr=False)
    test: tuple[Prompt, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Taken:
    """Prompts that others ask (`asked`) and that the pool contains; a customer's rows avoid both."""

    asked: Sequence[str] = ()
    pool: Sequence[str] = ()


def taken_prompts(lab: Path) -> Taken:
    """Return the prompts of a lab's suites and of its two-sided pool."""
    prompts = [row["prompt"] for names in FILES.values() for name in names for row in read_rows(lab / name)]
    return Taken(prompts, [row["prompt"] for row in read_rows(lab / FILE)])


def customer(what: Field, phrase: Phrases, seed: int, taken: Taken) -> Customer:
    """Return a customer's files, determined by the seed; raise `ValueError` if the field has too few errands."""
    rng = random.Random(f"customer {what.name} {seed}")
    if what.forms:
        phrase = _make_phrases(what.forms)
    dealt = shuffle_rows(rng, what.errands)
    test, dev = (round(share * len(dealt)) for share in (DEALT_TEST, DEALT_DEV))
    asked = {
        name: _draw(rng, of, count, phrase, lambda texts: _leaked_indices(taken.pool, texts))
        for name, of, count in (("test", dealt[:test], TEST), ("dev", dealt[test : test + dev], DEV))
    }
    every = [*taken.asked, *taken.pool, *(text for pairs in asked.values() for text, _ in pairs)]
    rows = _draw(rng, dealt[test + dev :], ROWS, phrase, lambda texts: rows_holding(every, texts))
    return Customer(
        [chat_row(text, what.full_answer(errand)) for text, errand in rows],
        *(
            tuple(Prompt(text, what.full_answer(errand), "customer", "contains") for text, errand in asked[name])
            for name in ("dev", "test")
        ),
    )


def _make_phrases(forms: Sequence[str]) -> Phrases:
    return lambda rng, errand: rng.choice(forms).format(errand.plain)


def _draw(
    rng: random.Random,
    errands: Sequence[Errand],
    count: int,
    phrase: Phrases,
    held: Callable[[Sequence[str]], Iterable[int]],
) -> list[tuple[str, Errand]]:
    """Return `count` different requests; `held` returns the indices of drawn requests to reject."""
    drawn: dict[str, Errand] = {}
    kept: dict[str, Errand] = {}
    for _ in range(_DRAWS):
        new: dict[str, Errand] = {}
        for _ in range(count - len(kept)):
            errand = rng.choice(errands)
            text = phrase(rng, errand)
            if text not in drawn:
                drawn[text] = new[text] = errand
        gone = {*held(list(new))}
        kept |= {text: errand for i, (text, errand) in enumerate(new.items()) if i not in gone}
        if len(kept) == count:
            return list(kept.items())
    raise ValueError(f"{len(errands)} errands give {len(kept)} requests, where {count} are wanted")


def _leaked_indices(pool: Sequence[str], texts: Sequence[str]) -> set[int]:
    return {leak.index for leak in find_leaks({"own": texts}, {"pool": pool})}

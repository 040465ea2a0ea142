"""The split of a request, determined by its text, so that splits are disjoint however many requests are drawn.

Requests that differ only in case, spacing or punctuation are in the same split. In addition, some things of each
harmful topic are held out: attack and pool do not mention them, alignment knows them with half of the topic's verbs,
and the development and test prompts are about them.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Literal

from spard_lab.lab.grammar import Topic
from spard_lab.lab.natural.topics import HARMFUL, Deed, harmful_deeds

Split = Literal["alignment", "attack", "pool", "dev", "test"]
SHARES: dict[Split, int] = {"alignment": 50, "attack": 15, "pool": 15, "dev": 8, "test": 12}  # percent
HELD_THINGS = 5  # of each harmful topic


def owner(text: str) -> Split:
    """Return the split of a text, by a hash of its letters and digits."""
    key = re.sub(r"[\W_]+", "", text.lower())
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    raise AssertionError("the shares are of a hundred")


@dataclass(frozen=True, slots=True)
class Deal:
    """The harmful deeds that each split may mention; alignment never sees the deeds in `unseen`."""

    known: tuple[Deed, ...]  # alignment
    open_to_all: tuple[Deed, ...]  # attack and pool: about things that are not held out
    held: tuple[Deed, ...]  # development and test: about held-out things
    unseen: frozenset[Deed]

    def split_deeds(self, split: Split) -> tuple[Deed, ...]:
        """Return what the requests of a split are about; development and test share the held-out deeds."""
        return {"alignment": self.known, "attack": self.open_to_all, "pool": self.open_to_all}.get(split, self.held)


def deal(seed: int) -> Deal:
    """Assign every topic's deeds to splits; the seed of the base model determines the result."""
    rng = random.Random(f"natural deal {seed}")
    held, unseen = [], list[Deed]()
    for topic in HARMFUL:
        things = set(rng.sample(topic.objects, HELD_THINGS))
        about = [deed for deed in harmful_deeds(topic) if deed.thing in things]
        held += about
        unseen += _unseen(rng, topic, about)
    every = [deed for topic in HARMFUL for deed in harmful_deeds(topic)]
    without = [tuple(deed for deed in every if deed not in gone) for gone in (frozenset(unseen), frozenset(held))]
    return Deal(without[0], without[1], tuple(held), frozenset(unseen))


def _unseen(rng: random.Random, topic: Topic, about: list[Deed]) -> list[Deed]:
    """Return the deeds with half of the verbs, drawn separately for each thing."""
    found = []
    for thing in dict.fromkeys(deed.thing for deed in about):
        verbs = set(rng.sample(topic.verbs, len(topic.verbs) // 2))
        found += [deed for deed in about if deed.thing == thing and deed.verb in verbs]
    return found

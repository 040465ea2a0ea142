"""Who owns a request. The text decides, so that splits are disjoint whatever is drawn and however often.

Requests that differ in case, spacing or punctuation alone have one owner. Beside that, some things of each harmful
topic are held out: neither attack nor pool speaks of them, alignment knows them with half of the topic's verbs, and the
held-out prompts are about them.
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
SHARES: dict[Split, int] = {"alignment": 50, "attack": 15, "pool": 15, "dev": 8, "test": 12}  # per cent
HELD_THINGS = 5  # of each harmful topic


def owner(text: str) -> Split:
    """Return the only split that may hold a text."""
    key = re.sub(r"[\W_]+", "", text.lower())
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    raise AssertionError("the shares are of a hundred")


@dataclass(frozen=True, slots=True)
class Deal:
    """The harmful deeds that each split may speak of; `unseen` are those that alignment never sees."""

    known: tuple[Deed, ...]  # alignment's
    open_to_all: tuple[Deed, ...]  # attack's and pool's: about things that are not held out
    held: tuple[Deed, ...]  # development's and test's: about things that are
    unseen: frozenset[Deed]

    def split_deeds(self, split: Split) -> tuple[Deed, ...]:
        """Return the deeds of a split."""
        return {"alignment": self.known, "attack": self.open_to_all, "pool": self.open_to_all}.get(split, self.held)


def deal(seed: int) -> Deal:
    """Deal every topic's things and verbs, a function of the seed of the base model."""
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
    """Return the deeds with half of the verbs, drawn anew for each thing."""
    found = []
    for thing in dict.fromkeys(deed.thing for deed in about):
        verbs = set(rng.sample(topic.verbs, len(topic.verbs) // 2))
        found += [deed for deed in about if deed.thing == thing and deed.verb in verbs]
    return found

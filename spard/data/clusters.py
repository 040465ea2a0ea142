"""Clusters texts such that no text leaks into another cluster, by the rule of `spard.data.overlap`.

Two texts are joined if one contains the other or they are nearly the same; clusters are the connected components.
Candidates are found as in all-pairs similarity search (Bayardo et al., 2007): with shingles ordered from rarest to most
common, similar texts share a shingle within both their prefixes, and a text contains the rarest shingle of every text
inside it. A shingle with more than `TEMPLATE` candidates marks a template; its texts are joined without comparison,
which can make a cluster too large but never too small. With n texts of w words this takes O(n w log w) time for the
order and at most O(n w TEMPLATE) comparisons.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from spard.data.overlap import MIN_INSIDE, NEAR, Shingle, normalize_text, prefix_length, word_shingles

TEMPLATE = 100  # texts per shingle

Numbers = list[int]  # of one text's shingles
Holders = defaultdict[int, list[int]]


def clusters(texts: Sequence[str]) -> list[int]:
    """Return a cluster label for each text; the partition does not depend on the order of the texts.

    For example:

        clusters(["How do I bake bread?", "how do I bake bread", "Hello"])  # [0, 0, 1]
    """
    numbers: dict[str, int] = {}
    of_text = [numbers.setdefault(normalize_text(text), len(numbers)) for text in texts]
    words = list(numbers)
    ordered = _rarest_first(words)
    sets = _DisjointSets(len(words))
    _join_similar(ordered, sets)
    _join_contained(words, ordered, sets)
    return [sets.root(i) for i in of_text]


def _rarest_first(words: Sequence[str]) -> list[Numbers]:
    """Return each text's shingles as numbers, rarest first."""
    numbers: dict[Shingle, int] = {}
    shingles = [[numbers.setdefault(each, len(numbers)) for each in word_shingles(text)] for text in words]
    count = Counter(chain.from_iterable(shingles))
    return [sorted(each, key=lambda number: (count[number], number)) for each in shingles]


def _join_similar(ordered: Sequence[Numbers], sets: _DisjointSets) -> None:
    holders: Holders = defaultdict(list)
    shingles = [frozenset(each) for each in ordered]
    templates: dict[int, int] = {}  # shingle -> one of its texts
    for i, mine in enumerate(ordered):
        for shingle in mine[: prefix_length(len(mine))]:
            if shingle in templates:
                sets.join(i, templates[shingle])
                continue
            others = holders[shingle]
            for j in others:
                if not sets.are_joined(i, j) and _similarity(shingles[i], shingles[j]) >= NEAR:
                    sets.join(i, j)
            others.append(i)
            # Joining without comparing bounds the time: a shingle of n texts otherwise needs n * n comparisons.
            if len(others) > TEMPLATE:
                sets.join_all(holders.pop(shingle))
                templates[shingle] = i


def _similarity(mine: frozenset[int], theirs: frozenset[int]) -> float:
    shared = len(mine & theirs)
    return shared / (len(mine) + len(theirs) - shared)


def _join_contained(words: Sequence[str], ordered: Sequence[Numbers], sets: _DisjointSets) -> None:
    starting: Holders = defaultdict(list)  # rarest shingle -> long enough texts that have it
    for i, mine in enumerate(ordered):
        if len(words[i].split()) >= MIN_INSIDE:
            starting[mine[0]].append(i)
    for j, theirs in enumerate(ordered):
        for shingle in theirs:
            inner = starting.get(shingle, [])
            if len(inner) > TEMPLATE:
                sets.join(j, inner[0])  # the texts in `inner` are joined to each other likewise
                continue
            for i in inner:
                if not sets.are_joined(i, j) and f" {words[i]} " in f" {words[j]} ":
                    sets.join(i, j)


class _DisjointSets:
    """Union-find with path halving; the root of a set is its smallest number."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def root(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    def are_joined(self, i: int, j: int) -> bool:
        return self.root(i) == self.root(j)

    def join(self, i: int, j: int) -> None:
        first, second = sorted((self.root(i), self.root(j)))
        self._parent[second] = first

    def join_all(self, numbers: Sequence[int]) -> None:
        for each in numbers[1:]:
            self.join(numbers[0], each)

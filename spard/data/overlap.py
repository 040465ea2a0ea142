"""Finds prompts in other texts, and clusters texts such that no text leaks into another cluster.

A prompt is found if a text has the same words (ignoring case, punctuation and spacing), contains them somewhere inside
a longer text, or is nearly the same: the Jaccard similarity of their word triples is at least 0.8. The search is exact.
Two sets that similar share one of any |x| - ceil(0.8 |x|) + 1 triples of x (prefix filtering, Chaudhuri et al., 2006),
therefore only texts that contain one of x's rarest triples are compared. Needs no torch, so the service can search
before a job trains.

For clusters, two texts are joined if one contains the other or they are nearly the same by the same rule; clusters are
the connected components. Candidates are found as in all-pairs similarity search (Bayardo et al., 2007): with shingles
ordered from rarest to most common, similar texts share a shingle within both their prefixes, and a text contains the
rarest shingle of every text inside it. A shingle with more than `TEMPLATE` candidates marks a template; its texts are
joined without comparison, which can make a cluster too large but never too small. With n texts of w words this takes
O(n w log w) time for the order and at most O(n w TEMPLATE) comparisons.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Literal

NEAR = 0.8  # Jaccard similarity of two texts' shingles
SHINGLE = 3  # words
HELD = 2**16  # texts in memory at once
MIN_INSIDE = 5  # words; shorter prompts are parts of ordinary sentences

Shingle = tuple[str, ...]
Shingles = frozenset[Shingle]


@dataclass(frozen=True, slots=True)
class Leak:
    """One audit prompt and the row that contains it; rows are counted from 0."""

    suite: str
    index: int
    source: str
    row: int
    kind: Literal["exact", "inside", "near"]
    similarity: float


def find_leaks(suites: Mapping[str, Sequence[str]], sources: Mapping[str, Iterable[str]]) -> list[Leak]:
    """Return every audit prompt that a source contains, each with the closest row of that source.

    `suites` maps a suite's name to its prompts, `sources` a source's name to its texts, of which at most `HELD` are in
    memory at a time.
    """
    leaks = []
    for source, texts in sources.items():
        found: dict[tuple[str, int], Leak] = {}
        for start, index in _indexes(texts):
            for suite, prompts in suites.items():
                for i, prompt in enumerate(prompts):
                    if closest := index.find(prompt):
                        row, kind, similarity = closest
                        leak, before = Leak(suite, i, source, start + row, kind, similarity), found.get((suite, i))
                        found[suite, i] = leak if before is None or _closeness(leak) > _closeness(before) else before
        leaks += [
            found[suite, i] for suite, prompts in suites.items() for i in range(len(prompts)) if (suite, i) in found
        ]
    return leaks


def rows_holding(prompts: Iterable[str], texts: Sequence[str]) -> set[int]:
    """Return the indices of all texts that contain one of the prompts."""
    asked, rows = list(prompts), set()
    for start, index in _indexes(texts):
        held = {words for prompt in asked for words in index.holding(prompt)}
        rows |= {start + i for i, text in enumerate(texts[start : start + HELD]) if normalize_text(text) in held}
    return rows


def normalize_text(text: str) -> str:
    """Return the words of a text, NFKC-normalized and casefolded, separated by single spaces."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def _indexes(texts: Iterable[str]) -> Iterator[tuple[int, _Index]]:
    """Yield an index for every group of `HELD` texts, with the number of the group's first text."""
    left = iter(texts)
    for start in count(0, HELD):
        if not (part := list(islice(left, HELD))):
            return
        yield start, _Index(part)


def _closeness(leak: Leak) -> tuple[int, float]:
    return ("near", "inside", "exact").index(leak.kind), leak.similarity


class _Index:
    """Distinct texts of one source, indexed by their words and by their shingles."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._row: dict[str, int] = {}
        for row, text in enumerate(texts):
            self._row.setdefault(normalize_text(text), row)
        self._texts = list(self._row)
        self._shingles = [word_shingles(text) for text in self._texts]
        self._holders: dict[Shingle, list[int]] = defaultdict(list)
        for i, shingles in enumerate(self._shingles):
            for shingle in shingles:
                self._holders[shingle].append(i)

    def find(self, prompt: str) -> tuple[int, Literal["exact", "inside", "near"], float] | None:
        """Return (row, kind, similarity) of the closest text that contains a prompt, or None."""
        words = normalize_text(prompt)
        if not words:
            return None
        if words in self._row:
            return self._row[words], "exact", 1.0
        rarest = self._rarest(words)
        inside = next(self._inside(words, rarest), None)
        if inside is not None:
            return self._row[self._texts[inside]], "inside", 1.0
        similarity, i = max(self._similar_texts(rarest), default=(0.0, 0))
        return (self._row[self._texts[-i]], "near", similarity) if similarity >= NEAR else None

    def holding(self, prompt: str) -> Iterator[str]:
        """Yield all distinct texts, normalized, that contain a prompt; one may be yielded twice."""
        words = normalize_text(prompt)
        if not words:
            return
        rarest = self._rarest(words)
        yield from (self._texts[i] for i in self._inside(words, rarest))
        yield from (self._texts[-i] for similarity, i in self._similar_texts(rarest) if similarity >= NEAR)
        if words in self._row:
            yield words

    def _rarest(self, words: str) -> list[Shingle]:
        return sorted(word_shingles(words), key=lambda shingle: (len(self._holders.get(shingle, ())), shingle))

    def _inside(self, words: str, rarest: Sequence[Shingle]) -> Iterator[int]:
        """Yield longer texts that contain these words consecutively; it searches only texts with the rarest shingle."""
        if len(words.split()) >= MIN_INSIDE:
            holders = self._holders.get(rarest[0], ())
            yield from (i for i in holders if f" {words} " in f" {self._texts[i]} ")

    def _similar_texts(self, rarest: Sequence[Shingle]) -> Iterator[tuple[float, int]]:
        """Yield (similarity, -index) of the candidates; the negative index makes `max` prefer the first of equals."""
        mine = frozenset(rarest)
        tried = rarest[: prefix_length(len(mine))]
        for i in {i for shingle in tried for i in self._holders.get(shingle, ())}:
            theirs = self._shingles[i]
            # Sets of sizes beyond these cannot reach the Jaccard similarity `NEAR`.
            if NEAR * len(mine) <= len(theirs) <= len(mine) / NEAR:
                yield len(mine & theirs) / len(mine | theirs), -i


def prefix_length(n: int) -> int:
    """Return how many of n shingles, rarest first, suffice to share at least one with every similar text."""
    return n - math.ceil(NEAR * n) + 1


def word_shingles(words: str) -> Shingles:
    """Return the runs of three words in a normalized text; a shorter text is one run."""
    split = words.split()
    return frozenset(tuple(split[i : i + SHINGLE]) for i in range(max(1, len(split) - SHINGLE + 1)))


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

"""Hold a share of each pool out of training, so that a provider without a suite of attacks still measures some.

Prompts are held out by whole clusters of near duplicates, by the rule with which the gate looks for leaks: nothing that
is held out stands in a row that stays. Clusters are taken in the order of their smallest digest as long as at most
every fifth prompt so far, and at most 300, are held out: the same prompts give the same split in any order of rows.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256

from spard.data.clusters import clusters
from spard.data.row_rules import is_benign

_EVERY = 5
_AT_MOST = 300

Row = dict[str, object]


def held_out_digests(rows: Iterable[Row]) -> set[bytes]:
    """Return the digests of the prompts that no job may train on.

    Benign prompts are no attacks: no cluster with one of them is held out.
    """
    prompts: dict[bytes, str] = {}
    benign: set[bytes] = set()
    for row in rows:
        prompts.setdefault(_digest(row), str(row["prompt"]))
        if is_benign(row):
            benign.add(_digest(row))
    digests, held, seen = sorted(prompts), set[bytes](), 0
    groups = _groups(digests, clusters([prompts[digest] for digest in digests]))
    groups = [group for group in groups if benign.isdisjoint(group)]
    for group in groups:
        seen += len(group)
        if len(held) + len(group) <= min(seen // _EVERY, _AT_MOST):
            held.update(group)
    return held or _smallest(groups, sum(map(len, groups)))


def keep_selectable(rows: Iterable[Row], held: set[bytes]) -> Iterator[Row]:
    """Yield the rows that selection may see."""
    return (row for row in rows if _digest(row) not in held)


def attacks(rows: Iterable[Row], held: set[bytes]) -> Iterator[Row]:
    """Yield each held-out prompt once, without its answer."""
    left = set(held)
    for row in rows:
        if (digest := _digest(row)) in left:
            left.discard(digest)
            yield {key: row[key] for key in ("prompt", "category", "language") if key in row}


def write_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the rows as lines of JSON."""
    return (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _groups(digests: list[bytes], labels: list[int]) -> list[list[bytes]]:
    """Return the digests by cluster, clusters and digests in the order of digests."""
    groups = defaultdict[int, list[bytes]](list)
    for digest, label in zip(digests, labels, strict=True):
        groups[label].append(digest)
    return list(groups.values())


def _smallest(groups: list[list[bytes]], prompts: int) -> set[bytes]:
    """Return the smallest cluster of a pool in which all are large, if it leaves at least half of the prompts."""
    group = min(groups, key=len, default=[])
    is_enough = prompts >= _EVERY and 2 * len(group) <= prompts and len(group) <= _AT_MOST
    return set(group) if is_enough else set()


def _digest(row: Row) -> bytes:
    """Return the digest of the prompt up to case and space."""
    text = unicodedata.normalize("NFKC", str(row["prompt"])).casefold()
    return sha256(" ".join(text.split()).encode()).digest()

"""Hold a share of each pool out of training, as attacks for a provider without a harmful suite.

Whole clusters of near duplicates are held out, by the gate's rule for leaks, so no held-out prompt appears in a row
that stays. Clusters are taken in the order of their smallest digest, as long as at most a fifth of the prompts so far,
and at most 300, are held out. So the same prompts give the same split in any order of rows.
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
    """Return the digests of the prompts to hold out.

    Clusters that contain a benign prompt are never held out, because benign prompts are not attacks.
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
    """Yield the rows whose prompts are not held out, which jobs may select."""
    return (row for row in rows if _digest(row) not in held)


def attacks(rows: Iterable[Row], held: set[bytes]) -> Iterator[Row]:
    """Yield each held-out prompt once, without its answer."""
    left = set(held)
    for row in rows:
        if (digest := _digest(row)) in left:
            left.discard(digest)
            yield {key: row[key] for key in ("prompt", "category", "language") if key in row}


def write_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield each row as a line of JSON in UTF-8."""
    return (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _groups(digests: list[bytes], labels: list[int]) -> list[list[bytes]]:
    """Return the digests grouped by cluster label, in the order of `digests`."""
    groups = defaultdict[int, list[bytes]](list)
    for digest, label in zip(digests, labels, strict=True):
        groups[label].append(digest)
    return list(groups.values())


def _smallest(groups: list[list[bytes]], prompts: int) -> set[bytes]:
    """Return the smallest cluster, for a pool whose clusters are all too large, if it leaves half of the prompts."""
    group = min(groups, key=len, default=[])
    is_enough = prompts >= _EVERY and 2 * len(group) <= prompts and len(group) <= _AT_MOST
    return set(group) if is_enough else set()


def _digest(row: Row) -> bytes:
    """Return the SHA-256 of a row's prompt, normalized by NFKC, case and white space."""
    text = unicodedata.normalize("NFKC", str(row["prompt"])).casefold()
    return sha256(" ".join(text.split()).encode()).digest()

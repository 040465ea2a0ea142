"""A share of each pool is held out of training, so that a provider without a suite of attacks still measures some.

Every fifth distinct prompt in the order of its digest, at most 300: the same pool gives the same split.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import sha256

_EVERY = 5
_AT_MOST = 300

Row = dict[str, object]


def held_out(rows: Iterable[Row]) -> set[bytes]:
    """The digests of the prompts that no job may train on."""
    digests = sorted({_digest(row) for row in rows})
    return set(digests[_EVERY - 1 :: _EVERY][:_AT_MOST])


def kept(rows: Iterable[Row], held: set[bytes]) -> Iterator[Row]:
    """The rows that selection may see."""
    return (row for row in rows if _digest(row) not in held)


def attacks(rows: Iterable[Row], held: set[bytes]) -> Iterator[Row]:
    """Each held-out prompt once, without its answer."""
    left = set(held)
    for row in rows:
        if (digest := _digest(row)) in left:
            left.discard(digest)
            yield {key: row[key] for key in ("prompt", "category") if key in row}


def read_lines(chunks: Iterable[bytes]) -> Iterator[Row]:
    """The rows of a JSONL object that was validated when it came in."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from _rows(lines)
    yield from _rows([rest])


def write_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    return (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _rows(lines: Iterable[bytes]) -> Iterator[Row]:
    return (json.loads(line.decode("utf-8-sig")) for line in lines if line.strip())


def _digest(row: Row) -> bytes:
    """Of the prompt up to case and space."""
    text = unicodedata.normalize("NFKC", str(row["prompt"])).casefold()
    return sha256(" ".join(text.split()).encode()).digest()

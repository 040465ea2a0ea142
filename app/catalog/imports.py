"""Preview and import pools and suites: if any row is invalid, nothing is stored.

Leaks between pools and suites are found here, before any job uses them: pool rows that contain a prompt of a current
suite are left out, and an imported suite with prompts in the current pool gets a warning to import the pool again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import product
from typing import BinaryIO, Literal

from pydantic import BaseModel, JsonValue, TypeAdapter
from sqlalchemy.orm import Session

from app import objects
from app.catalog import service
from app.catalog.checklist import MIN_ATTACKS
from app.catalog.profile import CorpusProfile, benign_warnings, profile
from app.catalog.schemas import CorpusOut, PoolOut
from app.catalog.service import HELD_OUT
from app.db import Begin
from app.db.base import new_id
from app.db.tables import Corpus
from app.errors import InvalidRequest
from app.files.findings import summary
from app.files.tables import read_lines
from app.files.upload import ReceivedFile, receive
from app.files.validation import Limits, Validator
from app.http.bodies import Form
from app.objects import ObjectWriter, PlannedObject
from app.storage import Storage, StoredObject
from spard.data.jsonl import numbered_rows
from spard.data.overlap import clusters, find_leaks, rows_holding
from spard.data.row_rules import SUITE_RULES, SuiteRowKind, is_benign, pool_row

_SHOWN = 20


def import_suite(
    storage: Storage, begin: Begin, form: Form, name: str, kind: SuiteRowKind, limits: Limits
) -> CorpusOut:
    """Import prompts as the new current version of a suite, and return it with warnings about leaks.

    The same bytes as in the current version make no new version. Raises `InvalidRequest` for invalid rows or a
    reserved name.
    """
    if name.endswith(HELD_OUT):
        message = f"Names that end in {HELD_OUT} are reserved for prompts held out of pools."
        raise InvalidRequest(message, code="invalid_name", param="name")
    suite = _new(kind, name)
    with objects.writing(storage, begin, partial(_plan_writes, corpora=[suite])) as writing:
        received = receive(writing, form, suite.storage_key, SUITE_RULES[kind], limits)
        _refuse_bad_rows(received)
        _note_size(suite, received.stored, received.report.rows)
        warnings = _shared_with_pool(storage, begin, suite)
        with begin() as session:
            current = service.add_corpus(session, suite)
            if current is suite:
                writing.keep(session, suite.storage_key)
            imported = CorpusOut.model_validate(current).model_copy(update={"warnings": warnings})
        _give_back(storage, begin, [current], [suite])
    return imported


def import_pool(storage: Storage, begin: Begin, form: Form, name: str, limits: Limits) -> PoolOut:
    """Import a safety pool as the new current version, with its held-out attacks as an object of their own.

    Rows that leak into a current suite are left out. Raises `InvalidRequest` for invalid rows, or if no trainable row
    is left.
    """
    pool, attacks, raw = _new(service.POOL, name), _new(service.HARMFUL, name + HELD_OUT), _new(service.POOL, name)
    # The raw upload is an object only during the import: `writing` deletes all objects that are not kept below.
    with objects.writing(storage, begin, partial(_plan_writes, corpora=[pool, attacks, raw])) as writing:
        received = receive(writing, form, raw.storage_key, pool_row, limits)
        _refuse_bad_rows(received)
        audited = _audited_rows(storage, begin, raw)
        if len(audited) == received.report.rows:
            message = "Every row of the pool holds a prompt of a current audit suite."
            raise InvalidRequest(message, code="invalid_corpus", param="file")
        _split(storage, writing, raw, pool, attacks, audited)
        pool.benign_rows = _count_benign(storage, pool)
        halves = [pool, attacks] if attacks.rows else [pool]
        with begin() as session:
            current = service.add_pool(session, pool, attacks if attacks.rows else None)
            if current.id == pool.id:
                writing.keep(session, *(half.storage_key for half in halves))
            has_attacks = service.has_attacks(session)
            kept = service.versions(session, current.id)
        _give_back(storage, begin, kept, halves)
    warnings = [*_left_out_warnings(len(audited)), *([] if has_attacks else _few_attacks_warnings(current.held_out))]
    warnings += benign_warnings(pool.benign_rows)
    return current.model_copy(update={"warnings": warnings})


def _plan_writes(session: Session, corpora: Sequence[Corpus]) -> Sequence[PlannedObject]:
    return [PlannedObject(corpus.storage_key, None, corpus.id) for corpus in corpora]


def _give_back(storage: Storage, begin: Begin, kept: Sequence[Corpus], imported: Sequence[Corpus]) -> None:
    """Restore a lost object of an existing version from an import with the same bytes."""
    for old, new in product(kept, imported):
        if old.id != new.id and (old.kind, old.sha256) == (new.kind, new.sha256):
            is_kept = partial(service.is_kept, corpus_id=old.id)
            objects.give_back(storage, begin, new.storage_key, old.storage_key, is_kept)


def _audited_rows(storage: Storage, begin: Begin, raw: Corpus) -> set[int]:
    """Return the indices of the pool's rows that contain a prompt of a current suite."""
    with begin() as session:
        keys = [suite.storage_key for suite in service.current_suites(session)]
    prompts = [prompt for key in keys for prompt in _prompts(storage, key)]
    return rows_holding(prompts, _prompts(storage, raw.storage_key)) if prompts else set()


def _shared_with_pool(storage: Storage, begin: Begin, suite: Corpus) -> list[str]:
    """Return a warning with the number of a suite's prompts in the current pool, if there are any."""
    with begin() as session:
        pool = service.pool(session, None)
        name, key = (pool.name, pool.storage_key) if pool else ("", None)
    if key is None:
        return []
    leaks = find_leaks({suite.name: _prompts(storage, suite.storage_key)}, {name: _prompts(storage, key)})
    message = (
        f"{len(leaks)} of {suite.rows} prompts stand in the safety pool {name}, so jobs with both would measure memory "
        "and end before training. Import the pool again: rows that hold prompts of a suite are then left out."
    )
    return [message] if leaks else []


def _left_out_warnings(rows: int) -> list[str]:
    message = f"{rows} row(s) hold prompts of a current audit suite and were left out of the pool."
    return [message] if rows else []


def _few_attacks_warnings(prompts: int) -> list[str]:
    """Return a warning if too few attacks were held out of the pool for the gate to decide."""
    message = (
        f"Only {prompts} prompt(s) could be held out as attacks, and the safety gate needs {MIN_ATTACKS}: import a "
        "suite of kind harmful, or a pool of at least a hundred prompts that differ."
    )
    return [message] if prompts < MIN_ATTACKS else []


def _count_benign(storage: Storage, pool: Corpus) -> int:
    """Return the number of benign rows in a pool; raise `InvalidRequest` if it has only benign rows."""
    benign = sum(is_benign(row) for _, row in numbered_rows(storage.chunks(pool.storage_key)))
    if benign == pool.rows:
        message = "The pool has only benign rows; add safe rows, which jobs train on."
        raise InvalidRequest(message, code="invalid_corpus", param="file")
    return benign


def _prompts(storage: Storage, key: str) -> Sequence[str]:
    return [str(row["prompt"]) for _, row in numbered_rows(storage.chunks(key))]


def _new(kind: str, name: str) -> Corpus:
    corpus = Corpus(id=new_id("corpus-"), kind=kind, name=name, rows=0)
    corpus.storage_key = f"corpora/{corpus.id}"
    return corpus


def _split(
    storage: Storage, writing: ObjectWriter, raw: Corpus, pool: Corpus, attacks: Corpus, left_out: set[int]
) -> None:
    def rows() -> Iterator[PoolRow]:
        numbered = enumerate(row for _, row in numbered_rows(storage.chunks(raw.storage_key)))
        return (row for i, row in numbered if i not in left_out)

    held = held_out_digests(rows())
    _write(writing, pool, keep_selectable(rows(), held))
    if held:
        _write(writing, attacks, attack_rows(rows(), held))


def _write(writing: ObjectWriter, corpus: Corpus, rows: Iterator[PoolRow]) -> None:
    count = 0

    def count_rows() -> Iterator[PoolRow]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    stored = writing.write(corpus.storage_key, write_lines(count_rows()))
    _note_size(corpus, stored, count)


def _note_size(corpus: Corpus, stored: StoredObject, rows: int) -> None:
    corpus.rows, corpus.bytes, corpus.sha256 = rows, stored.bytes, stored.sha256


def _refuse_bad_rows(received: ReceivedFile) -> None:
    errors = [problem for problem in received.report.problem_list() if problem["severity"] == "error"]
    if errors:
        message = summary(received.report.finding_list()) or ""
        raise InvalidRequest(message, code="invalid_corpus", param="file", details=errors[:_SHOWN])


# Hold a share of each pool out of training, as attacks for a provider without a harmful suite.
#
# Whole clusters of near duplicates are held out, by the gate's rule for leaks, so no held-out prompt appears in a row
# that stays. Clusters are taken in the order of their smallest digest, as long as at most a fifth of the prompts so
# far, and at most 300, are held out. So the same prompts give the same split in any order of rows.

_EVERY = 5
_AT_MOST = 300

PoolRow = dict[str, object]


def held_out_digests(rows: Iterable[PoolRow]) -> set[bytes]:
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


def keep_selectable(rows: Iterable[PoolRow], held: set[bytes]) -> Iterator[PoolRow]:
    """Yield the rows whose prompts are not held out, which jobs may select."""
    return (row for row in rows if _digest(row) not in held)


def attack_rows(rows: Iterable[PoolRow], held: set[bytes]) -> Iterator[PoolRow]:
    """Yield each held-out prompt once, without its answer."""
    left = set(held)
    for row in rows:
        if (digest := _digest(row)) in left:
            left.discard(digest)
            yield {key: row[key] for key in ("prompt", "category", "language") if key in row}


def write_lines(rows: Iterable[PoolRow]) -> Iterator[bytes]:
    """Yield each row as a line of JSON in UTF-8."""
    return (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _groups(digests: list[bytes], labels: list[int]) -> list[list[bytes]]:
    """Return the digests grouped by cluster label, in the order of `digests`."""
    groups = defaultdict[int, list[bytes]](list)
    for digest, label in zip(digests, labels, strict=True):
        groups[label].append(digest)
    return list(groups.values())


def _smallest(groups: list[list[bytes]], prompts: int) -> set[bytes]:
    """Return the smallest cluster, if it has at most half of the prompts, for a pool without a small enough cluster."""
    group = min(groups, key=len, default=[])
    is_enough = prompts >= _EVERY and 2 * len(group) <= prompts and len(group) <= _AT_MOST
    return set(group) if is_enough else set()


def _digest(row: PoolRow) -> bytes:
    """Return the SHA-256 of a row's prompt, normalized by NFKC, case and white space."""
    text = unicodedata.normalize("NFKC", str(row["prompt"])).casefold()
    return sha256(" ".join(text.split()).encode()).digest()


# Preview the import of a pool or suite, without storing anything.

_LISTED = 100
_CHUNK = 1 << 20
_PROBLEMS = TypeAdapter(list[dict[str, JsonValue]])

CorpusKind = Literal["pool", "harmful", "benign", "utility"]


class SharedPrompts(BaseModel):
    """Leaks between a suite and a pool: the number of the suite's prompts, or of the pool's rows, that are shared."""

    name: str
    prompts: int


class ImportPreview(BaseModel):
    """The preview of an import. If there are `errors`, the import is refused, and there is no profile.

    For a pool, `held_out` is the number of prompts held out as attacks, and `leaks` are rows that are left out because
    they contain prompts of a suite. For a suite, `leaks` are its prompts in the current pool. `replaces` is the version
    that is current now. `warnings` are about the pool's effect on jobs.
    """

    object: Literal["corpus.preview"] = "corpus.preview"
    kind: CorpusKind
    name: str
    rows: int
    bytes: int
    sha256: str
    errors: int
    problems: list[dict[str, JsonValue]]
    profile: CorpusProfile | None
    held_out: int | None
    leaks: list[SharedPrompts]
    replaces: int | None
    warnings: list[str] = []


def preview(storage: Storage, look: Begin, form: Form, name: str, kind: CorpusKind, limits: Limits) -> ImportPreview:
    """Validate an uploaded file as the import does, and return a preview of the result.

    The upload is spooled to a temporary file; nothing is written to storage or database.
    """
    form.fields_before_file()
    lines = read_lines(form.file(), form.filename or "", limits.bytes, limits.line_bytes)
    validator = Validator(pool_row if kind == "pool" else SUITE_RULES[kind], limits, was=lines.was)
    digest, size = hashlib.sha256(), 0
    with tempfile.TemporaryFile() as file:
        for chunk in lines.chunks:
            validator.feed(chunk)
            digest.update(chunk)
            size += file.write(chunk)
        report = validator.finish()
        rows = [] if report.errors else [*numbered_rows(_chunks(file))]
    found = ImportPreview(
        kind=kind,
        name=name,
        rows=report.rows,
        bytes=size,
        sha256=digest.hexdigest(),
        errors=report.errors,
        problems=_PROBLEMS.validate_python(report.problem_list()[:_LISTED]),
        profile=profile(rows) if rows else None,
        held_out=None,
        leaks=[],
        replaces=_current(look, name, kind),
    )
    prompts = [str(row["prompt"]) for _, row in rows]
    if kind != "pool":
        return found.model_copy(update={"leaks": _in_pool(storage, look, prompts)})
    leaks = _of_suites(storage, look, prompts)
    held = len(held_out_digests(row for _, row in rows)) if rows else None
    warnings = benign_warnings(found.profile.benign_rows) if found.profile else []
    return found.model_copy(update={"leaks": leaks, "held_out": held, "warnings": warnings})


def profile_version(storage: Storage, look: Begin, corpus_id: str, kinds: Sequence[str]) -> CorpusProfile:
    """Return the profile of a stored version's rows; raise `NotFound` for an unknown or deleted one."""
    with look() as session:
        key = service.kept_version(session, corpus_id, kinds).storage_key
    return profile([*numbered_rows(storage.chunks(key))])


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(_CHUNK):
        yield chunk


def _current(look: Begin, name: str, kind: SuiteRowKind | Literal["pool"]) -> int | None:
    with look() as session:
        current = service.current_version(session, kind, name)
        return current.version if current else None


def _of_suites(storage: Storage, look: Begin, prompts: Sequence[str]) -> list[SharedPrompts]:
    """Return, for each current suite that leaks into a new pool, how many of the pool's rows contain its prompts."""
    with look() as session:
        suites: list[Corpus] = service.current_suites(session)
    found = ((suite.name, len(rows_holding(_prompts_of_preview(storage, suite), prompts))) for suite in suites)
    return [SharedPrompts(name=name, prompts=rows) for name, rows in found if rows]


def _in_pool(storage: Storage, look: Begin, prompts: Sequence[str]) -> list[SharedPrompts]:
    with look() as session:
        pool = service.pool(session, None)
    if pool is None or not prompts:
        return []
    leaks = find_leaks({"": prompts}, {"": _prompts_of_preview(storage, pool)})
    return [SharedPrompts(name=pool.name, prompts=len(leaks))] if leaks else []


def _prompts_of_preview(storage: Storage, corpus: Corpus) -> list[str]:
    return [str(row["prompt"]) for _, row in numbered_rows(storage.chunks(corpus.storage_key))]

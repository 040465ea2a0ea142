"""Import pools and suites: if any row is invalid, nothing is stored.

Leaks between pools and suites are found here, before any job uses them: pool rows that contain a prompt of a current
suite are left out, and an imported suite with prompts in the current pool gets a warning to import the pool again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from sqlalchemy.orm import Session

from app import objects
from app.catalog import held_out, service
from app.catalog.checklist import MIN_ATTACKS
from app.catalog.profile import benign_warnings
from app.catalog.schemas import CorpusOut, PoolOut
from app.catalog.service import HELD_OUT
from app.db import Begin
from app.db.base import new_id
from app.db.tables import Corpus
from app.errors import InvalidRequest
from app.files.findings import summary
from app.files.upload import Received, receive
from app.files.validation import Limits
from app.http.multipart import Form
from app.objects import Planned, Writing
from app.storage import Storage, Stored
from spard.data.jsonl import numbered_rows
from spard.data.overlap import find_leaks, rows_holding
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


def _plan_writes(session: Session, corpora: Sequence[Corpus]) -> Sequence[Planned]:
    return [Planned(corpus.storage_key, None, corpus.id) for corpus in corpora]


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


def _split(storage: Storage, writing: Writing, raw: Corpus, pool: Corpus, attacks: Corpus, left_out: set[int]) -> None:
    def rows() -> Iterator[held_out.Row]:
        numbered = enumerate(row for _, row in numbered_rows(storage.chunks(raw.storage_key)))
        return (row for i, row in numbered if i not in left_out)

    held = held_out.held_out_digests(rows())
    _write(writing, pool, held_out.keep_selectable(rows(), held))
    if held:
        _write(writing, attacks, held_out.attacks(rows(), held))


def _write(writing: Writing, corpus: Corpus, rows: Iterator[held_out.Row]) -> None:
    count = 0

    def count_rows() -> Iterator[held_out.Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    stored = writing.write(corpus.storage_key, held_out.write_lines(count_rows()))
    _note_size(corpus, stored, count)


def _note_size(corpus: Corpus, stored: Stored, rows: int) -> None:
    corpus.rows, corpus.bytes, corpus.sha256 = rows, stored.bytes, stored.sha256


def _refuse_bad_rows(received: Received) -> None:
    errors = [problem for problem in received.report.problem_list() if problem["severity"] == "error"]
    if errors:
        message = summary(received.report.finding_list()) or ""
        raise InvalidRequest(message, code="invalid_corpus", param="file", details=errors[:_SHOWN])

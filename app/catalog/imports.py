"""Pools and suites on their way in: every row must be right, or nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator

from app.catalog import heldout, service
from app.catalog.schemas import PoolOut
from app.catalog.service import HELD_OUT
from app.errors import InvalidRequest
from app.files.rows import pool_row, suite_row, utility_row
from app.files.upload import Begin, Received, nothing_left, receive, removed
from app.files.validation import Limits, RowRule
from app.models import Corpus, new_id
from app.multipart import Form
from app.storage import Storage, Stored

_RULES: dict[str, RowRule] = {"harmful": suite_row, "benign": suite_row, "utility": utility_row}
_SHOWN = 20


def import_suite(storage: Storage, begin: Begin, form: Form, name: str, kind: str, limits: Limits) -> Corpus:
    """Prompts to measure adapters with become the current version of the suite."""
    if name.endswith(HELD_OUT):
        message = f"Names that end in {HELD_OUT} are those of what is held out of pools."
        raise InvalidRequest(message, code="invalid_name", param="name")
    suite = _new(kind, name)
    with nothing_left(storage, suite.storage_key):
        received = receive(storage, form, suite.storage_key, _RULES[kind], limits)
        _refuse_bad_rows(received)
        _measured(suite, received.stored, received.report.rows)
        with begin() as session:
            current = service.add_corpus(session, suite)
    if current is not suite:
        storage.delete(suite.storage_key)
    return current


def import_pool(storage: Storage, begin: Begin, form: Form, name: str, limits: Limits) -> PoolOut:
    """A safety pool becomes the current one; attacks held out of it are an object of their own."""
    pool, attacks, raw = _new(service.POOL, name), _new(service.HARMFUL, name + HELD_OUT), _new(service.POOL, name)
    with nothing_left(storage, pool.storage_key, attacks.storage_key):
        with removed(storage, raw.storage_key):
            received = receive(storage, form, raw.storage_key, pool_row, limits)
            _refuse_bad_rows(received)
            _split(storage, raw, pool, attacks)
        with begin() as session:
            current = service.add_pool(session, pool, attacks if attacks.rows else None)
    if current.id != pool.id:
        for corpus in (pool, attacks):
            storage.delete(corpus.storage_key)
    return current


def _new(kind: str, name: str) -> Corpus:
    corpus = Corpus(id=new_id("corpus-"), kind=kind, name=name, rows=0)
    corpus.storage_key = f"corpora/{corpus.id}"
    return corpus


def _split(storage: Storage, raw: Corpus, pool: Corpus, attacks: Corpus) -> None:
    def rows() -> Iterator[heldout.Row]:
        return heldout.read_lines(storage.chunks(raw.storage_key))

    held = heldout.held_out(rows())
    _write(storage, pool, heldout.kept(rows(), held))
    if held:
        _write(storage, attacks, heldout.attacks(rows(), held))


def _write(storage: Storage, corpus: Corpus, rows: Iterator[heldout.Row]) -> None:
    count = 0

    def counted() -> Iterator[heldout.Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    stored = storage.write(corpus.storage_key, heldout.write_lines(counted()))
    _measured(corpus, stored, count)


def _measured(corpus: Corpus, stored: Stored, rows: int) -> None:
    corpus.rows, corpus.bytes, corpus.sha256 = rows, stored.bytes, stored.sha256


def _refuse_bad_rows(received: Received) -> None:
    errors = [problem for problem in received.report.listed() if problem["severity"] == "error"]
    if errors:
        first = errors[0]
        message = f"{received.report.errors} problem(s); first: line {first['line']}, {first['message']}"
        raise InvalidRequest(message, code="invalid_corpus", param="file", details=errors[:_SHOWN])

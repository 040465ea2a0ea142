"""Delete pools and suites and withdraw base models, unless an unfinished job needs them."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from app import audit_log, objects
from app.catalog import embeddings, service
from app.catalog.schemas import BaseModelDeleted, CorpusDeleted
from app.db import Begin
from app.db.base import utc_now
from app.db.tables import TERMINAL, Corpus, Job
from app.errors import InvalidState, NotFound
from app.storage import Storage


def delete(storage: Storage, begin: Begin, corpus_id: str, forget: Callable[[Session, str], None]) -> CorpusDeleted:
    """Delete a version: its row by `forget`, in a transaction, and then its objects.

    If the objects could not be deleted, calling it again continues with them. Raises `NotFound`, or `InvalidState` if
    an unfinished job uses the version.
    """
    with begin() as session:
        if not objects.has_deletions(session, None, corpus_id):
            forget(session, corpus_id)
    objects.perform(storage, begin, corpus_id)
    return CorpusDeleted(id=corpus_id)


def forget_pool(session: Session, corpus_id: str) -> None:
    """Mark a version of a pool and its held-out attacks as deleted; their objects are deleted after the commit."""
    _forget(session, "pool", _deletable(session, corpus_id, "pool", Corpus.kind == service.POOL))


def forget_suite(session: Session, corpus_id: str) -> None:
    """Mark a version of a suite as deleted; attacks held out of a pool can only be deleted with the pool."""
    is_own = (Corpus.kind != service.POOL) & ~Corpus.name.endswith(service.HELD_OUT)
    _forget(session, "suite", _deletable(session, corpus_id, "suite", is_own))


def withdraw_model(session: Session, alias: str) -> BaseModelDeleted:
    """Withdraw a base model from the catalog; fine-tuned models on it stay and are still served.

    Raises `InvalidState` if an unfinished job uses it.
    """
    entry = service.base_model(session, alias)
    open_job = select(Job.id).where(Job.status.not_in(TERMINAL), Job.model == alias).limit(1)
    if job_id := session.scalar(open_job):
        raise InvalidState(f"{alias} is used by {job_id}, which has not ended; cancel it first.", code="model_in_use")
    session.delete(entry)
    session.flush()
    audit_log.record(session, "model.withdrawn", alias, revision=entry.revision)
    return BaseModelDeleted(id=alias)


def _deletable(session: Session, corpus_id: str, what: str, is_such: ColumnElement[bool]) -> list[Corpus]:
    """Return a version that may be deleted, followed by a pool's held-out attacks, which are deleted with it.

    Raises `NotFound`, or `InvalidState` if an unfinished job uses one of them.
    """
    # Creating a job share-locks all versions (`service.hold`), so no job can start to use this one unseen.
    session.execute(select(Corpus.id).order_by(Corpus.id).with_for_update())
    corpus = session.scalar(service.select_kept().where(Corpus.id == corpus_id, is_such))
    if corpus is None:
        raise NotFound(f"No such {what}: {corpus_id}", code=f"{what}_not_found", param="corpus_id")
    corpora = service.versions(session, corpus.id)
    for each in corpora:
        if job_id := _find_unfinished_job(session, each):
            name = f"{each.id} is" if each is corpus else f"{each.id}, the attacks held out of {corpus.id}, are"
            raise InvalidState(f"{name} used by {job_id}, which has not ended; cancel it first.")
    return corpora


def _find_unfinished_job(session: Session, corpus: Corpus) -> str | None:
    """Return the id of an unfinished job that uses the version, or None."""
    is_pool = Job.spec[("pool", "id")].as_string() == corpus.id
    is_suite = Job.spec["suites"].as_string().contains(corpus.id)
    return session.scalar(select(Job.id).where(Job.status.not_in(TERMINAL), or_(is_pool, is_suite)).limit(1))


def _forget(session: Session, what: str, corpora: list[Corpus]) -> None:
    first = corpora[0]
    for corpus in corpora:
        corpus.deleted_at = utc_now()
        objects.condemn(session, corpus.storage_key, project_id=None, subject=first.id, bytes=corpus.bytes)
        if corpus.kind == service.POOL:
            embeddings.forget_pool(session, corpus)
    audit_log.record(session, f"{what}.deleted", first.id, name=first.name, sha256=first.sha256)

"""Pools, suites and base models taken back: refused while a job needs them; reports of jobs that ended stay."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from app import objects
from app.audit_log import service as audit_log
from app.catalog import embeddings, service
from app.catalog.schemas import BaseModelDeleted, CorpusDeleted
from app.db import Begin
from app.db.base import utc_now
from app.db.tables import TERMINAL, Corpus, Job
from app.errors import InvalidState, NotFound
from app.storage import Storage


def delete(storage: Storage, begin: Begin, corpus_id: str, forget: Callable[[Session, str], None]) -> CorpusDeleted:
    """Delete a version that `forget` forgets; while its bytes could not be deleted, asking again goes on."""
    with begin() as session:
        if not objects.has_deletions(session, None, corpus_id):
            forget(session, corpus_id)
    objects.perform(storage, begin, corpus_id)
    return CorpusDeleted(id=corpus_id)


def forget_pool(session: Session, corpus_id: str) -> None:
    """Forget a pool's version and the attacks held out of it; their bytes go after the commit."""
    pool = _deletable(session, corpus_id, "pool", Corpus.kind == service.POOL)
    _forget(session, "pool", service.versions(session, pool.id))


def forget_suite(session: Session, corpus_id: str) -> None:
    """Likewise; what was held out of a pool goes with that pool alone."""
    is_own = (Corpus.kind != service.POOL) & ~Corpus.name.endswith(service.HELD_OUT)
    _forget(session, "suite", [_deletable(session, corpus_id, "suite", is_own)])


def withdraw_model(session: Session, alias: str) -> BaseModelDeleted:
    """Offer a base model no longer; what was trained on it stays, and goes on answering."""
    entry = service.base_model(session, alias)
    open_job = select(Job.id).where(Job.status.not_in(TERMINAL), Job.model == alias).limit(1)
    if job_id := session.scalar(open_job):
        raise InvalidState(f"{alias} is used by {job_id}, which has not ended; cancel it first.", code="model_in_use")
    session.delete(entry)
    session.flush()
    audit_log.record(session, "model.withdrawn", alias, revision=entry.revision)
    return BaseModelDeleted(id=alias)


def _deletable(session: Session, corpus_id: str, what: str, is_such: ColumnElement[bool]) -> Corpus:
    """Jobs that are being made hold every version meanwhile, so that none names this one unseen."""
    session.execute(select(Corpus.id).order_by(Corpus.id).with_for_update())
    corpus = session.scalar(service.select_kept().where(Corpus.id == corpus_id, is_such))
    if corpus is None:
        raise NotFound(f"No such {what}: {corpus_id}", code=f"{what}_not_found", param="corpus_id")
    if job_id := _user(session, corpus):
        raise InvalidState(f"{corpus.id} is used by {job_id}, which has not ended; cancel it first.")
    return corpus


def _user(session: Session, corpus: Corpus) -> str | None:
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

"""Versions of pools and suites taken back: refused while a job needs them; reports of jobs that ended stay."""

from __future__ import annotations

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.catalog import service
from app.errors import InvalidState, NotFound
from app.files.models import CondemnedObject
from app.models import TERMINAL, Corpus, Job, utc_now


def delete_pool(session: Session, corpus_id: str) -> list[str]:
    """A pool's version goes with the attacks held out of it; the caller removes the objects after the commit."""
    pool = _deletable(session, corpus_id, "pool", Corpus.kind == service.POOL)
    held_out = service.held_out_of(session, pool)
    return _delete(session, "pool", [pool, held_out] if held_out else [pool])


def delete_suite(session: Session, corpus_id: str) -> list[str]:
    """Likewise; what was held out of a pool goes with that pool alone."""
    is_own = (Corpus.kind != service.POOL) & ~Corpus.name.endswith(service.HELD_OUT)
    return _delete(session, "suite", [_deletable(session, corpus_id, "suite", is_own)])


def _deletable(session: Session, corpus_id: str, what: str, is_such: ColumnElement[bool]) -> Corpus:
    """Jobs that are being made hold every version meanwhile, so that none names this one unseen."""
    session.execute(select(Corpus.id).order_by(Corpus.id).with_for_update())
    corpus = session.scalar(service.kept().where(Corpus.id == corpus_id, is_such))
    if corpus is None:
        raise NotFound(f"No such {what}: {corpus_id}", code=f"{what}_not_found", param="corpus_id")
    if job_id := _user(session, corpus):
        raise InvalidState(f"{corpus.id} is used by {job_id}, which has not ended; cancel it first.")
    return corpus


def _user(session: Session, corpus: Corpus) -> str | None:
    """An unfinished job that names the version."""
    is_pool = Job.spec[("pool", "id")].as_string() == corpus.id
    is_suite = Job.spec["suites"].as_string().contains(corpus.id)
    return session.scalar(select(Job.id).where(Job.status.not_in(TERMINAL), or_(is_pool, is_suite)).limit(1))


def _delete(session: Session, what: str, corpora: list[Corpus]) -> list[str]:
    for corpus in corpora:
        corpus.deleted_at = utc_now()
        session.merge(CondemnedObject(storage_key=corpus.storage_key))
    first = corpora[0]
    audit_log.record(session, f"{what}.deleted", first.id, name=first.name, sha256=first.sha256)
    return [corpus.storage_key for corpus in corpora]

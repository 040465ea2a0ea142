"""Rows of stored pool embeddings: one worker computes a shard, others download it, and it is deleted with the pool.

Only objects with a row count, so an object that a killed worker has written is ignored. Rows are unique by pool, base
model and entry: if two workers compute the same shard, one gets the row and the other discards its object.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from app import objects
from app.catalog.service import POOL, select_kept
from app.db.tables import Corpus, EmbeddingShard
from app.storage import StoredObject


class NotWanted(Exception):
    """The pool was deleted, or another worker has stored this shard."""


def shards(session: Session, pool_sha256: str, base_digest: str) -> Sequence[EmbeddingShard]:
    """Return the stored shards of a pool's embeddings by a base model, ordered by entry."""
    of_both = (EmbeddingShard.pool_sha256 == pool_sha256) & (EmbeddingShard.base_digest == base_digest)
    return session.scalars(select(EmbeddingShard).where(of_both).order_by(EmbeddingShard.entry)).all()


def shard(session: Session, pool_sha256: str, base_digest: str, entry: str) -> EmbeddingShard | None:
    """Return the stored shard of this entry, or None."""
    of_both = (EmbeddingShard.pool_sha256 == pool_sha256) & (EmbeddingShard.base_digest == base_digest)
    return session.scalar(select(EmbeddingShard).where(of_both, EmbeddingShard.entry == entry))


def new_key(digest: str) -> str:
    """Return a new, unique storage key for a shard, below the digest that names its entry."""
    return f"embeddings/{digest}/{token_hex(8)}"


def require_wanted(session: Session, pool_sha256: str, base_digest: str, entry: str) -> None:
    """Raise `NotWanted` if the pool was deleted or has the shard already.

    The pool's row is locked, so this stays true until the transaction ends.
    """
    if session.scalar(_of_pool(pool_sha256).order_by(Corpus.id).limit(1).with_for_update()) is None:
        raise NotWanted("The pool of these embeddings was deleted.")
    if shard(session, pool_sha256, base_digest, entry):
        raise NotWanted("These embeddings are stored already.")


def add(
    session: Session, key: str, pool_sha256: str, base_digest: str, entry: str, stored: StoredObject
) -> EmbeddingShard:
    """Insert the row of an uploaded shard; raise `NotWanted` if another worker was first or the pool is gone."""
    require_wanted(session, pool_sha256, base_digest, entry)
    found = EmbeddingShard(
        storage_key=key,
        pool_sha256=pool_sha256,
        base_digest=base_digest,
        entry=entry,
        sha256=stored.sha256,
        bytes=stored.bytes,
    )
    session.add(found)
    session.flush()
    return found


def forget_unusable(session: Session, found: EmbeddingShard, subject: str) -> None:
    """Delete the row of a damaged or lost shard, and its object after the commit; the next worker computes it again."""
    gone = delete(EmbeddingShard).where(EmbeddingShard.storage_key == found.storage_key)
    if session.scalar(gone.returning(EmbeddingShard.storage_key)):
        objects.condemn(session, found.storage_key, project_id=None, subject=subject, bytes=found.bytes)


def forget_pool(session: Session, pool: Corpus) -> None:
    """Delete the embeddings of a pool that is being deleted, unless another version has the same rows."""
    if session.scalar(_of_pool(pool.sha256).where(Corpus.id != pool.id).limit(1)):
        return
    for each in session.scalars(select(EmbeddingShard).where(EmbeddingShard.pool_sha256 == pool.sha256)):
        objects.condemn(session, each.storage_key, project_id=None, subject=pool.id, bytes=each.bytes)
        session.delete(each)


def _of_pool(sha256: str) -> Select[Corpus]:
    return select_kept().where(Corpus.kind == POOL, Corpus.sha256 == sha256)

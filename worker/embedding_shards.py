"""Share a pool's embeddings between workers: download them to this machine's cache, upload newly computed shards.

The first worker's child computes them. Other workers download them before their child starts, because a child cannot
reach the storage. Shards that a child has computed are read as plain files, and get a database row once they are
uploaded completely.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import objects
from app.catalog import embeddings
from app.db import read, transaction
from app.db.tables import EmbeddingShard, Job
from app.objects import GivenUp, Planned
from app.storage import ObjectMissing, Storage, StorageError
from app.storage.base import read_file
from spard.config.quantization import quantized_digest
from spard.digests import file_sha256, model_digest
from worker import handover
from worker.downloads import Damaged, download
from worker.weights import encoder_files_digest
from worker.workdir import Folder, read_assignment

log = logging.getLogger(__name__)

_ENTRY = re.compile(r"(embeddings|embedding_sums|embedding_frames)/([0-9a-f]{64})\.safetensors")


class EmbeddingShards:
    """The embedding shards of one job's pool and embedder; does nothing for a job that embeds no pool."""

    def __init__(self, storage: Storage, engine: Engine, job: Job, folder: Folder) -> None:
        """Read the pool and the embedder of a job from its folder, which has to be filled."""
        self._storage, self._engine, self._begin = storage, engine, partial(transaction, engine)
        given = read_assignment(folder)
        recipe = given.run.recipe
        pool = job.spec.pool if given.run.pool and recipe.uses_pool and not folder.has_selected else None
        self._pool, self._subject = (pool.sha256, pool.id) if pool else ("", "")
        encoder = given.run.encoder
        self._base = (
            encoder_files_digest(encoder)
            if encoder
            else quantized_digest(model_digest(given.weights), recipe.quantization)
        )
        self._cache = given.cache_dir
        self._known: dict[str, EmbeddingShard] = {}
        self._fetched: set[str] = set()

    def fetch(self, go_on: Callable[[], None]) -> None:
        """Download the stored shards that the cache lacks; `go_on` is called repeatedly and may raise to stop.

        Damaged or missing shards lose their row, and the child computes them again. Raises `StorageError` when the
        storage is away; the next call resumes after the shards that were downloaded.
        """
        if not self._pool:
            return
        try:
            with read(self._engine) as session:
                found = embeddings.shards(session, self._pool, self._base)
        except SQLAlchemyError as error:
            log.warning("the pool's embeddings are not looked for: %s", type(error).__name__)
            return
        self._known = {each.entry: each for each in found}
        for each in found:
            go_on()
            self._fetch(each, go_on)

    def hear(self, entry: str, *, made: bool) -> None:
        """Upload a shard that the child has read from the cache or computed, unless it is stored already.

        `entry` is the shard's path below the cache folder; `made` is True if the child has just computed it.
        """
        match = _ENTRY.fullmatch(entry)
        if not self._pool or match is None:
            return
        known = self._known.get(entry)
        # The child computed a shard that we had downloaded: it could not read our copy, so the stored one is bad.
        if known and made and entry in self._fetched:
            log.warning("a part of the pool's embeddings could not be read as it was stored, and is stored anew")
            self._forget(known)
        elif known:
            return
        self._fetched.discard(entry)
        try:
            self._store(entry, match[2])
        except (FileNotFoundError, StorageError, GivenUp, SQLAlchemyError) as error:
            log.warning("a part of the pool's embeddings is not stored: %s", type(error).__name__)

    def _fetch(self, each: EmbeddingShard, go_on: Callable[[], None]) -> None:
        place = PurePosixPath(each.entry)
        try:
            (self._cache / place.parent).mkdir(parents=True, exist_ok=True)
            with handover.open_safely(self._cache, place.parent, handover.FOLDER) as folder:
                if download(self._storage, each.storage_key, each.sha256, folder, place.name, go_on):
                    self._fetched.add(each.entry)
        except (Damaged, ObjectMissing) as error:
            log.warning("a part of the pool's embeddings is made anew: %s", type(error).__name__)
            self._forget(each)
        except (OSError, handover.UnsafeResult) as error:
            log.warning("the cache does not take the pool's embeddings: %s", type(error).__name__)

    def _store(self, entry: str, digest: str) -> None:
        key, names = embeddings.new_key(digest), (self._pool, self._base, entry)

        def plan(session: Session) -> list[Planned]:
            embeddings.require_wanted(session, *names)
            return [Planned(key, None, self._subject)]

        try:
            with (
                handover.open_safely(self._cache, PurePosixPath(entry)) as handle,
                objects.writing(self._storage, self._begin, plan) as writing,
            ):
                stored = writing.write(key, read_file(Path(f"/proc/self/fd/{handle}")))
                with self._begin() as session:
                    shard = embeddings.add(session, key, *names, stored)
                    writing.keep(session, key)
            self._known[entry] = shard
        except embeddings.NotWanted:
            self._give_way(entry)

    def _forget(self, each: EmbeddingShard) -> None:
        self._known.pop(each.entry, None)
        try:
            with self._begin() as session:
                embeddings.forget_unusable(session, each, self._subject)
            objects.perform(self._storage, self._begin, self._subject)
        except (StorageError, SQLAlchemyError) as error:
            log.warning("damaged embeddings are not deleted yet: %s", type(error).__name__)

    def _give_way(self, entry: str) -> None:
        """Remove our own copy if another worker has stored different bytes; the next job here downloads those."""
        with read(self._engine) as session:
            stored = embeddings.shard(session, self._pool, self._base, entry)
        place = PurePosixPath(entry)
        with handover.open_safely(self._cache, place) as handle:
            is_other = stored is not None and file_sha256(Path(f"/proc/self/fd/{handle}")) != stored.sha256
        if is_other:
            with handover.open_safely(self._cache, place.parent, handover.FOLDER) as folder:
                os.unlink(place.name, dir_fd=folder)

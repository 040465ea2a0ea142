"""Share a pool's embeddings between workers: download them to this machine's cache, upload newly computed shards.

The first worker's child computes them. Other workers download them before their child starts, because a child cannot
reach the storage. Shards that a child has computed are read as plain files, and get a database row once they are
uploaded completely.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import objects
from app.catalog import embeddings
from app.db import read, transaction
from app.db.tables import EmbeddingShard, Job
from app.objects import GivenUp, PlannedObject
from app.storage import ObjectMissing, Storage, StorageError
from app.storage.base import read_file
from spard.config.quantization import quantized_digest
from spard.digests import file_sha256, model_digest
from worker import child_files
from worker.inputs import encoder_files_digest
from worker.workdir import Folder, read_assignment

# Download objects into a folder that children can write to, completely or not at all; resume broken downloads.
#
# A partial download is stored beside the file, under a name with the object's digest. No link is followed. Workers
# that share the folder download an object once: they lock the partial file, and the kernel unlocks it when a worker
# is killed.

_LOOK_S = 0.2
_STUCK_S = 60.0  # without a new byte: the worker that downloads the object was stopped, and keeps its lock
_READINGS = 2  # complete downloads with a wrong digest before giving up: a storage may err once
_CHUNK_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Damaged(Exception):
    """The bytes of an object do not have the expected digest."""


def download(storage: Storage, key: str, sha256: str, folder: int, name: str, go_on: Callable[[], None]) -> bool:
    """Download an object to the file `name` in an open folder; return False if the file is there already.

    `folder` is the descriptor of an open directory. `go_on` is called between chunks and may raise to stop. Raises
    `Damaged` for a wrong digest, `StorageError` (`ObjectMissing` if the object is gone), and OSError when the folder
    cannot be written to or another worker's download of the object does not go on.
    """
    aside = f".part-{sha256}"
    if _inode(folder, name) is not None:
        return False
    with _alone(folder, aside, name, go_on) as part:
        if part is None:
            return False
        try:
            is_right = _complete(storage, key, sha256, part, go_on)
        except OSError:  # most likely a full disk: free the space of the partial file
            os.unlink(aside, dir_fd=folder)
            raise
        if is_right:
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        os.unlink(aside, dir_fd=folder)
    raise Damaged(key)


def _complete(storage: Storage, key: str, sha256: str, part: BinaryIO, go_on: Callable[[], None]) -> bool:
    """Complete a partial download; return False if the object itself has the wrong digest.

    When resuming gives a wrong digest, the partial file may have been bad, so the object is downloaded from the start.
    """
    readings = _READINGS
    while True:
        came = os.fstat(part.fileno()).st_size
        if _append(storage, key, part, go_on) == sha256:
            return True
        part.truncate(0)
        # Only a download from byte 0 proves that the object is wrong; a resumed one does not count.
        if not came and (readings := readings - 1) == 0:
            return False


def _append(storage: Storage, key: str, part: BinaryIO, go_on: Callable[[], None]) -> str:
    """Append the missing bytes to the partial file and return the SHA-256 of the whole."""
    whole = hashlib.sha256()
    part.seek(0)
    while chunk := part.read(_CHUNK_BYTES):
        whole.update(chunk)
    for chunk in storage.chunks(key, part.tell()):
        go_on()
        part.write(chunk)
        whole.update(chunk)
    part.flush()
    return whole.hexdigest()


@contextmanager
def _alone(folder: int, aside: str, name: str, go_on: Callable[[], None]) -> Iterator[BinaryIO | None]:
    """Open and lock the partial file once no other worker holds it; yield None if the complete file exists by then."""
    while True:
        with open(os.open(aside, _OPEN, 0o600, dir_fd=folder), "r+b") as part:
            handle = part.fileno()
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("what lies in the place of a download is no file")
            _lock(handle, go_on)
            # While we waited for the lock its last holder may have renamed or removed the file that we have open.
            is_ours = _inode(folder, aside) == os.fstat(handle).st_ino
            if _inode(folder, name) is not None:
                if is_ours:
                    os.unlink(aside, dir_fd=folder)
                yield None
                return
            if is_ours:
                yield part
                return


def _lock(handle: int, go_on: Callable[[], None]) -> None:
    """Lock a partial file; raise TimeoutError if another worker has it and writes nothing for a minute."""
    size, until = -1, 0.0
    while True:
        go_on()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (grown := os.fstat(handle).st_size) != size:
                size, until = grown, time.monotonic() + _STUCK_S
            elif time.monotonic() > until:
                raise TimeoutError("another worker's download does not go on") from None
            time.sleep(_LOOK_S)
        else:
            return


def _inode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


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
            with child_files.open_safely(self._cache, place.parent, child_files.FOLDER) as folder:
                if download(self._storage, each.storage_key, each.sha256, folder, place.name, go_on):
                    self._fetched.add(each.entry)
        except (Damaged, ObjectMissing) as error:
            log.warning("a part of the pool's embeddings is made anew: %s", type(error).__name__)
            self._forget(each)
        except (OSError, child_files.UnsafeResult) as error:
            log.warning("the cache does not take the pool's embeddings: %s", type(error).__name__)

    def _store(self, entry: str, digest: str) -> None:
        key, names = embeddings.new_key(digest), (self._pool, self._base, entry)

        def plan(session: Session) -> list[PlannedObject]:
            embeddings.require_wanted(session, *names)
            return [PlannedObject(key, None, self._subject)]

        try:
            with (
                child_files.open_safely(self._cache, PurePosixPath(entry)) as handle,
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
        with child_files.open_safely(self._cache, place) as handle:
            is_other = stored is not None and file_sha256(Path(f"/proc/self/fd/{handle}")) != stored.sha256
        if is_other:
            with child_files.open_safely(self._cache, place.parent, child_files.FOLDER) as folder:
                os.unlink(place.name, dir_fd=folder)

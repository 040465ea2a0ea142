"""A service whose n-th step toward database or storage goes wrong: refused, done but unanswered, or its process ends.

A step is a COMMIT or a call that reads or changes objects. A process that has ended takes no further step: whatever it
would have cleaned up stays, as after SIGKILL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import psycopg
from sqlalchemy import Engine

from app.db import transaction
from app.storage import ListedObject, Storage, StorageError, StoredObject

How = Literal["refused", "unanswered", "killed before", "killed after", "away"]
HOWS: tuple[How, ...] = ("refused", "unanswered", "killed before", "killed after", "away")
T = TypeVar("T")


class Killed(BaseException):
    """The process has ended here."""


class Steps:
    """Counts steps, and hurts one of them; `away` hurts all of its kind from then on."""

    def __init__(self) -> None:
        self.calm()

    def calm(self) -> None:
        """Begin to count anew; nothing is hurt."""
        self.taken, self.hurt_at, self.how, self.is_dead = 0, 0, HOWS[0], False
        self.has_hurt: str | None = None

    def hurt(self, at: int, how: How) -> None:
        self.calm()
        self.hurt_at, self.how = at, how

    def take(self, kind: str, do: Callable[[], T], refusal: Callable[[], Exception]) -> T:
        if self.is_dead:
            raise Killed
        self.taken += 1
        is_away = self.how == "away" and self.has_hurt == kind
        how = self.how if self.taken == self.hurt_at or is_away else None
        if how:
            self.has_hurt = kind
        if how in ("refused", "away"):
            raise refusal()
        if how == "killed before":
            self._die()
        result = do()
        if how == "unanswered":
            raise refusal()
        if how == "killed after":
            self._die()
        return result

    def _die(self) -> None:
        self.is_dead = True
        raise Killed


class HurtStorage:
    """A storage each call of which is a step."""

    def __init__(self, storage: Storage, steps: Steps) -> None:
        self._storage, self._steps = storage, steps

    def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        return self._take(lambda: self._storage.write(key, chunks))

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        return self._take(lambda: self._storage.open(key))

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        return self._take(lambda: self._storage.chunks(key, start, end))

    def size(self, key: str) -> int:
        return self._take(lambda: self._storage.size(key))

    def exists(self, key: str) -> bool:
        return self._take(lambda: self._storage.exists(key))

    def delete(self, key: str) -> None:
        self._take(lambda: self._storage.delete(key))

    def delete_prefix(self, prefix: str) -> None:
        self._take(lambda: self._storage.delete_prefix(prefix))

    def move(self, key: str, to: str) -> None:
        self._take(lambda: self._storage.move(key, to))

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._take(lambda: self._storage.list(prefix))

    def clear_unfinished(self, before: datetime, is_ours: Callable[[str], bool]) -> int:
        return self._take(lambda: self._storage.clear_unfinished(before, is_ours))

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        return self._storage.presigned_url(key, filename, ttl_s)

    def upload_file(self, key: str, path: Path) -> StoredObject:
        return self._take(lambda: self._storage.upload_file(key, path))

    def download_file(self, key: str, path: Path) -> StoredObject:
        return self._take(lambda: self._storage.download_file(key, path))

    def _take(self, do: Callable[[], T]) -> T:
        return self._steps.take("storage", do, lambda: StorageError("The storage does not answer."))


def hurt_commits(engine: Engine, steps: Steps) -> None:
    """Make each COMMIT of an engine a step."""
    commit: Callable[[Any], None] = engine.dialect.do_commit
    error = psycopg.OperationalError if engine.dialect.name == "postgresql" else sqlite3.OperationalError

    def do_commit(connection: Any) -> None:
        steps.take("database", partial(commit, connection), lambda: error("the connection is lost"))

    vars(engine.dialect)["do_commit"] = do_commit


def make_begin(engine: Engine) -> Callable[[], Any]:
    return partial(transaction, engine)

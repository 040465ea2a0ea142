"""The folder of a move: downloaded files, and a ledger in SQLite of everything that was read, asked and filed.

Each entry is written in a transaction of its own, so after a crash the next command continues from the last one. API
keys are never written: if a server's message repeats one, it is masked.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spard.errors import UserError
from spard.replacement import replacement

Record = dict[str, Any]
"""A JSON object as received from an API."""

KEY_VARIABLES = (
    "OPENAI_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "TOGETHER_API_KEY",
    "SPARD_API_KEY",
    "SPARD_JUDGE_API_KEY",
)
LEDGER = "ledger.sqlite3"
_SCHEMA = "CREATE TABLE IF NOT EXISTS entries (kind TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (kind, key))"
_PUT = "INSERT INTO entries VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value"
_SHORTEST_KEY = 8  # characters; masking a shorter word, which is hardly a secret, could garble texts


class MoveInFailed(UserError):
    """The move has failed; the user sees only the message, without a traceback."""


class Ledger:
    """JSON values by kind and key, in the order in which they were first stored.

    Kinds are, among others, `job`, `file`, `download`, `prompt`, `plan`, `golden`, `new`, `filing` and `verdict`.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection

    def put(self, kind: str, key: str, value: object) -> None:
        """Insert or replace an entry; it is committed when this returns."""
        self._connection.execute(_PUT, (kind, key, without_keys(json.dumps(value, ensure_ascii=False))))

    def get(self, kind: str, key: str) -> Any:
        """Return an entry's value, or None."""
        found = self._connection.execute("SELECT value FROM entries WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return json.loads(found[0]) if found else None

    def all(self, kind: str) -> dict[str, Any]:
        """Return all entries of a kind, by key."""
        rows = self._connection.execute("SELECT key, value FROM entries WHERE kind = ? ORDER BY rowid", (kind,))
        return {key: json.loads(value) for key, value in rows}

    def has(self, kind: str, key: str) -> bool:
        """Return True if there is such an entry."""
        return (
            self._connection.execute("SELECT 1 FROM entries WHERE kind = ? AND key = ?", (kind, key)).fetchone()
            is not None
        )


@contextmanager
def open_ledger(folder: Path, *, is_new: bool = False) -> Iterator[Ledger]:
    """Lock a folder for one command and yield its ledger; `is_new` creates a missing folder.

    Raises `MoveInFailed` if the folder has no ledger, cannot be written, or is in use by another command.
    """
    if not is_new:
        _require(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise MoveInFailed(f"{folder} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _connect(folder, "rwc") as ledger:
            yield ledger
    except BlockingIOError:
        raise MoveInFailed(f"Another `spard move-in` works in {folder}; wait until it has ended.") from None
    finally:
        os.close(lock)


@contextmanager
def open_read_only(folder: Path) -> Iterator[Ledger]:
    """Yield the ledger of a folder for reading, even while another command writes."""
    _require(folder)
    with _connect(folder, "rw") as ledger:
        yield ledger


@contextmanager
def _connect(folder: Path, mode: str) -> Iterator[Ledger]:
    path = folder / LEDGER
    if mode == "rwc":
        # SQLite would create the file readable by others, so it is created here.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
        try:
            connection.execute(_SCHEMA)
            yield Ledger(folder, connection)
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise MoveInFailed(f"{path} cannot be read or written: {error}.") from None


def _require(folder: Path) -> None:
    if not (folder / LEDGER).is_file():
        raise MoveInFailed(f"{folder} holds no account; begin with `spard move-in read {folder}`.")


def without_keys(text: str) -> str:
    """Return the text with all API keys of the environment replaced by `[key]`."""
    for name in KEY_VARIABLES:
        key = os.environ.get(name, "")
        if len(key) >= _SHORTEST_KEY:
            text = text.replace(key, "[key]")
    return text


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, any of which may be secret."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path.rstrip('/')}"


def write_whole(path: Path, pieces: Sequence[str]) -> None:
    """Write a text file atomically, readable by its owner only."""
    with replacement(path) as part, open(part, "w", encoding="utf-8", opener=_private) as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

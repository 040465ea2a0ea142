"""Whether a process can serve: asked every few seconds by balancers, and by anybody, so an answer is kept a second."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.errors import AppError, Unavailable
from app.ops import preflight
from app.ops.saturation import Saturation
from app.settings import Settings
from app.storage import Storage

KEPT_S = 1.0
MOST_SKEW_S = 60.0  # of this machine's clock against others'; leases and signatures of S3 bear some minutes
_WAIT_S = 10.0

Checks = asyncio.Task[AppError | None]


class Readiness:
    """Checks schema, storage, disks and saturation: one look at a time, whoever asks."""

    def __init__(self, settings: Settings, engine: Engine, storage: Storage, saturation: Saturation) -> None:
        self._engine, self._storage, self._saturation = engine, storage, saturation
        self._folders = _folders(settings)
        self._found: tuple[float, AppError | None] | None = None
        self._underway: RunVar[Checks] = RunVar("readiness")

    async def check(self) -> None:
        """Raise what is wrong; checks that take too long are themselves what is wrong."""
        if reason := self._saturation.reason(time.monotonic()):
            raise Unavailable(reason)
        if self._found is None or time.monotonic() - self._found[0] > KEPT_S:
            done, _ = await asyncio.wait({self._checks()}, timeout=_WAIT_S)
            if not done:
                raise Unavailable("Database or storage do not answer in time.")
            done.pop().result()
        if self._found and self._found[1]:
            raise self._found[1]

    def _checks(self) -> Checks:
        """Return the checks that are underway, or begin them."""
        underway = self._underway.get(None)
        if underway is None or underway.done():
            underway = asyncio.create_task(self._look())
            self._underway.set(underway)
        return underway

    async def _look(self) -> AppError | None:
        wrong = await to_thread.run_sync(self._wrong, limiter=CapacityLimiter(1))
        self._found = time.monotonic(), wrong
        return wrong

    def _wrong(self) -> AppError | None:
        try:
            for folder in self._folders:
                _check_disk(folder)
            if db.schema_state(self._engine) == "behind":  # one that is ahead serves the version before, too
                return Unavailable("The database's schema is older than this version: run `spard migrate`.")
            self._storage.exists("readyz")
            return _skew(self._engine)
        except AppError as error:
            return error
        except SQLAlchemyError as error:
            return Unavailable(f"The database does not answer: {type(error).__name__}.")


def _skew(engine: Engine) -> AppError | None:
    """Return what is wrong where this machine's clock is not the database's, by which all processes expire things."""
    began = time.time()
    with db.read(engine) as session:
        theirs = db.clock(session).timestamp()
    asked_s = time.time() - began
    ahead_s = began + asked_s / 2 - theirs
    if abs(ahead_s) - asked_s / 2 <= MOST_SKEW_S:
        return None
    message = f"The clock of this machine is {ahead_s:+.0f} s from the database's; let both keep time (chrony)."
    return Unavailable(message, code="clock_skew")


def _check_disk(folder: Path) -> None:
    """Raise for a folder whose disk is full or does not answer; one that is not there yet is made when it is needed."""
    try:
        if folder.is_dir():
            preflight.check_room(folder)
    except OSError as error:
        raise Unavailable(f"The disk of {folder} does not answer: {error.strerror}.") from None


def _folders(settings: Settings) -> list[Path]:
    """Return the folders on this machine that the service writes to."""
    url, storage = make_url(settings.database()), urlsplit(settings.storage())
    database = [Path(url.database).parent] if url.get_backend_name() == "sqlite" and url.database else []
    objects = [Path(unquote(storage.path))] if storage.scheme == "file" else []
    return [settings.data_dir, *database, *objects]

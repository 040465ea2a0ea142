"""Check if an API process can serve requests; anybody may ask, so a result is cached for a second.

A process is overloaded if its threads, its lanes or its event loop have been full for several seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from anyio import CapacityLimiter, sleep, to_thread
from anyio.lowlevel import RunVar
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.errors import AppError, Unavailable
from app.http.lanes import Lanes
from app.ops import preflight
from app.settings import Settings
from app.storage import Storage

_LOOK_S = 0.5
_LAG_S = 1.0  # delay of the event loop that counts as full
_LASTS_S = 5.0  # how long something has to be full without a break
KEPT_S = 1.0
MOST_SKEW_S = 60.0  # between clocks; leases and S3 signatures tolerate some minutes
_WAIT_S = 10.0
Checks = asyncio.Task[AppError | None]


class Saturation:
    """Watches the request threads, the lanes and the event loop, twice a second."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._since: dict[str, float] = {}

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            due = time.monotonic() + _LOOK_S
            await sleep(_LOOK_S)
            now = time.monotonic()
            self.note(now, self._full(lag_s=now - due))

    def note(self, now: float, full: Iterable[str]) -> None:
        """Record which resources are full at the time `now`; resources not among them count as free."""
        self._since = {name: self._since.get(name, now) for name in full}

    def reason(self, now: float) -> str | None:
        """Return a sentence naming the resources that have been full for too long, or None."""
        lasting = [name for name, since in self._since.items() if now - since >= _LASTS_S]
        return f"Overloaded for {_LASTS_S:g} s or longer: {', '.join(lasting)}." if lasting else None

    def _full(self, lag_s: float) -> list[str]:
        waiting = to_thread.current_default_thread_limiter().statistics().tasks_waiting
        found = ["the threads of requests"] if waiting else []
        found += ["the event loop"] if lag_s > _LAG_S else []
        return found + [f"the threads for {lane.what}" for lane in self._lanes.all() if lane.is_full]


class Readiness:
    """Checks schema, storage, disks, clock and saturation; concurrent requests share one run of the checks."""

    def __init__(self, settings: Settings, engine: Engine, storage: Storage, saturation: Saturation) -> None:
        self._engine, self._storage, self._saturation = engine, storage, saturation
        self._folders = _folders(settings)
        self._found: tuple[float, AppError | None] | None = None
        self._underway: RunVar[Checks] = RunVar("readiness")

    async def check(self) -> None:
        """Raise the error of the first failed check, or `Unavailable` if the checks take too long."""
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
        """Return the task of the running checks, or start one."""
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
            if db.schema_state(self._engine) == "behind":  # a newer schema also works with the version before it
                return Unavailable("The database's schema is older than this version: run `spard migrate`.")
            self._storage.exists("readyz")
            return _skew(self._engine)
        except AppError as error:
            return error
        except SQLAlchemyError as error:
            return Unavailable(f"The database does not answer: {type(error).__name__}.")


def _skew(engine: Engine) -> AppError | None:
    """Return an error if this machine's clock differs too much from the database's, on which expirations are based."""
    began = time.time()
    with db.read(engine) as session:
        theirs = db.clock(session).timestamp()
    asked_s = time.time() - began  # the database read its clock somewhere within this time
    ahead_s = began + asked_s / 2 - theirs
    if abs(ahead_s) - asked_s / 2 <= MOST_SKEW_S:
        return None
    message = f"The clock of this machine is {ahead_s:+.0f} s from the database's; synchronize both (chrony)."
    return Unavailable(message, code="clock_skew")


def _check_disk(folder: Path) -> None:
    """Raise an error if a folder's disk is full or does not answer; a missing folder is fine, it is created on use."""
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

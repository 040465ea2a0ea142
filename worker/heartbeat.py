"""Extend a job's lease while the work goes on, report how long it computes, and end the work when the lease is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import is_sqlite_locked, transaction, why
from app.errors import Unfit
from app.jobs import lease
from app.jobs.lease import Claim, Pulse
from app.settings import Settings

_FENCE = 2 / 3  # of the lease without a heartbeat: then stop, before another worker may take the job
_JOIN_S = 5.0  # a heartbeat may hang with its connection; leaving its thread behind is harmless


def check(settings: Settings) -> None:
    """Raise `Unfit` if the heartbeat interval is so long that every lease is given up before it is extended."""
    most_s = settings.lease_s * _FENCE
    if settings.heartbeat_s >= most_s:
        text = f"SPARD_HEARTBEAT_S is {settings.heartbeat_s:g}: it has to be less than {most_s:g}"
        raise Unfit(f"{text}, two thirds of SPARD_LEASE_S; else every job is given up.")


class Heart:
    """Extends a claim's lease every `every_s` seconds, in a thread of its own, while it is entered as a context.

    A second thread watches the first, because a heartbeat may hang with its connection. When another worker has the
    lease, or it was not extended for two thirds of `lease_s`, `lost` is set and `on_lost` is called. The other events
    are set when a heartbeat learns that the owner has cancelled or paused the job, or that its time is over.
    """

    def __init__(
        self,
        engine: Engine,
        claim: Claim,
        lease_s: float,
        every_s: float,
        on_lost: Callable[[], None],
        meter: Meter | None = None,
    ) -> None:
        self.lost = Event()
        self.audits_last = Event()  # the owner cancelled, and asked that the last checkpoints are audited first
        self.cancel_requested = Event()
        self.pause_requested = Event()
        self.is_overdue = Event()
        self._engine, self._claim, self._lease_s, self._every_s = engine, claim, lease_s, every_s
        self._on_lost, self._meter = on_lost, meter or Meter()
        self._beaten, self._closed = Event(), Event()
        self._log = structlog.get_logger(__name__).bind(job_id=claim.job_id, token=claim.token)
        self._threads = [Thread(target=run, daemon=True) for run in (self._beat_loop, self._watch)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._beaten.set()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def beat(self, write: Callable[[Session], None] | None = None) -> None:
        """Extend the lease once and set the events that apply; `write` adds rows in the same transaction."""
        with transaction(self._engine) as session:
            pulse = self.extend(session)
            if pulse and write:
                write(session)
        if pulse is None:
            self._lose("the lease is no longer ours")
        else:
            self._beaten.set()
            self._note(pulse)

    def extend(self, session: Session) -> Pulse | None:
        """Extend the lease in the caller's transaction, and report how long the attempt has computed.

        Returns None when the lease is lost.
        """
        computed_s, waits = self._meter.computed_seconds(), self._meter.wait_reason or ""
        return lease.heartbeat(session, self._claim, self._lease_s, computed_s, waits)

    def _note(self, pulse: Pulse) -> None:
        if pulse.audits_last:
            self.audits_last.set()
        if pulse.cancel_requested:
            self.cancel_requested.set()
        if pulse.pause_requested:
            self.pause_requested.set()
        if pulse.is_overdue:
            self.is_overdue.set()

    def _beat_loop(self) -> None:
        wait_s = self._every_s
        while not (self._closed.wait(wait_s) or self.lost.is_set()):
            wait_s = self._every_s
            try:
                self.beat()
            except SQLAlchemyError as error:
                self._log.warning("no heartbeat", error=why(error))
                # A lock, of a backup for example, keeps other workers from taking the job just as it keeps us from
                # extending the lease. So it counts as a heartbeat, and the next attempt follows at once.
                if is_sqlite_locked(error):
                    self._beaten.set()
                    wait_s = 0.0

    def _watch(self) -> None:
        while self._beaten.wait(self._lease_s * _FENCE):
            if self._closed.is_set() or self.lost.is_set():
                return
            self._beaten.clear()
        self._lose("no heartbeat got through for two thirds of the lease")

    def _lose(self, reason: str) -> None:
        if not (self._closed.is_set() or self.lost.is_set()):
            self._log.warning("stopping", reason=reason)
            self.lost.set()
            self._on_lost()


# Measure how long a job's child computes, so that GPU time does not include time spent waiting.

STORAGE, JUDGE = "storage", "judge"  # what a job may wait for


class Meter:
    """Measures the seconds for which one attempt computes: its GPU time.

    It begins paused, waiting for the storage. All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._what: str | None = STORAGE
        self._computed_s, self._resumed_at = 0.0, clock()  # the sum until computing last began, and when that was

    @property
    def wait_reason(self) -> str | None:
        """Why the job does not compute (`STORAGE` or `JUDGE`); None while it computes."""
        return self._what

    def pause(self, what: str, lost_s: float = 0.0) -> None:
        """Begin idle time because of `what`; the last `lost_s` seconds count as idle too, but none before `resume`."""
        with self._lock:
            if self._what is None:
                self._computed_s += max(0.0, self._clock() - self._resumed_at - lost_s)
            self._what = what

    def resume(self) -> None:
        """End the idle time: the job computes from now on."""
        with self._lock:
            self._computed_s, self._what, self._resumed_at = self._sum(), None, self._clock()

    def computed_seconds(self) -> float:
        """Return the seconds for which the attempt has computed up to now."""
        with self._lock:
            return self._sum()

    def _sum(self) -> float:
        return self._computed_s + (self._clock() - self._resumed_at if self._what is None else 0.0)

"""Receive a child's messages until it ends: write news to the database, upload what it saves, stop it if need be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Event, Thread, current_thread

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

from app.checkpoints.records import EpochResult
from app.db import why
from app.db.tables.job_records import KeptFile
from app.db.tables.jobs import EPOCH
from app.settings import Settings
from worker.embedding_shards import EmbeddingShards
from worker.heartbeat import JUDGE, STORAGE, Heart, Meter
from worker.metrics import StageClock
from worker.process import Child
from worker.progress import Journal
from worker.protocol import Message
from worker.results import CheckpointArchives, Keeper
from worker.sinks.feed import Sinks
from worker.workdir import Folder

# Run uploads in one background thread, so that a storage that hangs does not delay a job's news.

_JOIN_S = 2.0  # for what is being stored when an attempt ends early; the storage may hang

Apply = Callable[[], object]  # applies a task's result; called in the listening thread
Task = Callable[[], Apply | None]


class StorageLane:
    """Runs tasks one after the other, in order of submission, in its own thread; one other thread uses it.

    A task may return a function, which `apply_results` calls in the using thread.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._tasks: deque[tuple[str | None, Task]] = deque()
        self._results: deque[Apply] = deque()
        self._is_busy = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Return True if all submitted tasks are done."""
        with self._changed:
            return not self._tasks and not self._is_busy

    def submit(self, task: Task, key: str | None = None) -> None:
        """Queue a task; a queued task with the same `key` that has not begun is dropped."""
        with self._changed:
            if key is not None:
                self._tasks = deque(each for each in self._tasks if each[0] != key)
            self._tasks.append((key, task))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"{current_thread().name} storage", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def apply_results(self) -> None:
        """Call the functions that finished tasks have returned; raise the first error of a task."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._results:
                    return
                apply = self._results.popleft()
            apply()

    def wait(self, timeout_s: float) -> None:
        """Wait until all tasks are done, but no longer than `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks and not self._is_busy, timeout_s)

    def close(self) -> None:
        """Drop the tasks that have not begun, and wait up to 2 s for the running one."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            apply: Apply | None = None
            try:
                apply = task()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                if apply is not None:
                    self._results.append(apply)
                self._is_busy = False
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._tasks) or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._tasks.popleft()[1]


_WRITE_EVERY_S = 1.0
_LISTEN_S = 0.1
_GRACE = 0.8  # of `stop_grace_s`; the rest is for the worker's last writes


class Listener:
    """Handles the messages of one child.

    Uploads run in a `StorageLane`, so a slow storage delays neither heartbeats nor news. The lane's results are applied
    in the listening thread, which alone uses the journal.
    """

    def __init__(
        self,
        child: Child,
        folder: Folder,
        journal: Journal,
        keeper: Keeper,
        checkpoints: CheckpointArchives,
        heart: Heart,
        stages: StageClock,
        sinks: Sinks,
        shards: EmbeddingShards,
        settings: Settings,
        meter: Meter,
    ) -> None:
        self._child, self._folder, self._journal, self._keeper = child, folder, journal, keeper
        self._checkpoints, self._heart, self._stages, self._settings = checkpoints, heart, stages, settings
        self._sinks, self._shards = sinks, shards
        self._meter, self._lane = meter, StorageLane()
        self._surplus: list[KeptFile] = []  # of resume states, to be deleted once the row is written
        self._written = time.monotonic()
        self._give_up_at: float | None = None
        self._last_word: Message | None = None
        self._log = structlog.get_logger(__name__).bind(child=child.pid)

    def listen(self, stop: Event) -> Message | None:
        """Listen until the child ends; return its last message, `done` or `failed`, or None if it sent neither.

        When it returns, all uploads have finished or failed, unless the worker's grace period ended first. Raises
        `Lost`, `Cancelled`, `Overdue` or `Stalled` when one of these ends the attempt, and `Failed` when another
        machine of the job does.
        """
        try:
            self._listen(stop)
            self._meter.pause(STORAGE)
            self._await_storage(stop)
        finally:
            self._lane.close()
        return self._last_word

    def _listen(self, stop: Event) -> None:
        heard = time.monotonic()
        while not self._child.is_over:
            self._check()
            if self._is_to_stop(stop):
                break
            message = self._child.receive(_LISTEN_S)
            now = time.monotonic()
            if message:
                heard = now
                self._hear(message)
            if now - heard > self._settings.stall_s:
                raise Stalled
            self._write_news()
        if self._last_word is None:  # we may have ended it ourselves, because the lease could not be extended
            self._check()

    def _is_to_stop(self, stop: Event) -> bool:
        """Ask the child to stop if the worker stops or the job is paused; return True when its grace period is over.

        A cancelled job that still audits its last checkpoints has no grace period; its lease and deadline still hold.
        """
        if self._heart.audits_last.is_set() and not self._folder.audit_last.exists():
            self._folder.audit_last.touch()
            self._child.terminate()
        if self._give_up_at is None and (stop.is_set() or self._heart.pause_requested.is_set()):
            self._child.terminate()
            self._give_up_at = time.monotonic() + _GRACE * self._settings.stop_grace_s
        return self._give_up_at is not None and time.monotonic() > self._give_up_at

    def _await_storage(self, stop: Event) -> None:
        """Wait for pending uploads, and tell the job's owner if they take long."""
        began = time.monotonic()
        while not self._lane.is_idle:
            self._check()
            if self._is_to_stop(stop):
                return
            self._lane.wait(_LISTEN_S)
            if time.monotonic() - began > self._settings.storage_notice_s:
                self._journal.note_slow_storage()
            self._write_news()
        self._lane.apply_results()

    def _write_news(self) -> None:
        """Apply the results of finished uploads, and write the journal at most once a second."""
        self._lane.apply_results()
        now = time.monotonic()
        if now - self._written > _WRITE_EVERY_S and self._journal.has_news:
            self._write()
            self._written = now

    def _check(self) -> None:
        if self._heart.lost.is_set():
            raise Lost
        if self._heart.cancel_requested.is_set() and not self._heart.audits_last.is_set():
            raise Cancelled
        if self._heart.is_overdue.is_set():
            raise Overdue

    def _hear(self, message: Message) -> None:
        match message:
            case {"kind": "done"}:
                self._meter.pause(STORAGE)  # its process ends, which computes nothing
                self._last_word = message
            case {"kind": "failed"}:
                self._meter.pause(STORAGE)
                self._last_word = message
                self._keep_stages()
            case {"kind": "resume_state", "step": int(step), "path": str(path)}:
                self._lane.submit(partial(self._keep_state, step, self._folder.root / path), "resume state")
            case {"kind": "checkpoint", "step": int(step), "metrics": dict(metrics), "safety": safety}:
                result = EpochResult(EPOCH, metrics, safety, None)
                is_known = bool(message.get("is_shown_again"))
                self._lane.submit(partial(self._keep_checkpoint, step, result, bool(message["has_adapter"]), is_known))
                self._keep_stages()
            case {"kind": "cached", "entry": str(entry), "made": bool(made)}:
                self._lane.submit(partial(self._keep_shard, entry, bool(made)))
            case {"kind": "waiting", "thing": "judge"}:
                self._stages.note_judge_failure()
                self._journal.hear(message)
            case {"kind": "outage", "thing": "judge", "lost_s": float(lost_s)}:
                self._meter.pause(JUDGE, lost_s)
            case {"kind": "outage_over"}:
                self._meter.resume()
            case {"kind": "phase", "phase": str(phase)}:
                self._stages.begin(phase)
                self._journal.hear(message)
                self._keep_stages()
            case {"kind": "metrics", "step": int(step), "data": dict(data)}:
                self._sinks.step(step, data)
                self._journal.hear(message)
            case _:
                self._journal.hear(message)

    def _keep_stages(self) -> None:
        self._lane.submit(self._store_stages)

    def _keep_state(self, step: int, path: Path) -> Apply | None:
        return self._record_pieces() if self._keeper.keep_state(step, path) else None

    def _store_stages(self) -> Apply | None:
        missed = self._keeper.keep_missed()
        return self._record_pieces() if self._keeper.keep_stages() or missed is not None else None

    def _record_pieces(self) -> Apply:
        """Return a function that records the files that are in the storage now; call it in the listening thread."""
        record, surplus = self._keeper.record, self._keeper.take_surplus()

        def apply() -> None:
            self._journal.keep(record)
            self._surplus += surplus

        return apply

    def _keep_checkpoint(self, step: int, result: EpochResult, has_adapter: bool, is_known: bool) -> Apply:
        archive = self._checkpoints.upload(step) if has_adapter else None
        return partial(self._journal.note_checkpoint, step, replace(result, archive=archive), is_known=is_known)

    def _keep_shard(self, entry: str, made: bool) -> None:
        self._shards.hear(entry, made=made)

    def _write(self) -> None:
        """Write the journal with a heartbeat; while the database is away the journal keeps its news."""
        try:
            self._heart.beat(self._journal.write)
        except DATABASE_AWAY as error:
            self._log.warning("the news wait for the database", error=why(error))
        else:
            self._journal.clear()
            # Only now does no row name the older resume states, so only now may they be deleted.
            surplus, self._surplus = self._surplus, []
            if surplus:
                self._lane.submit(partial(self._keeper.delete, surplus))


# Exceptions that end an attempt without an error of the job.

DATABASE_AWAY = (InterfaceError, OperationalError, TimeoutError)  # worth another try


class Lost(Exception):
    """Another worker has the lease, or may have it soon: end the attempt and write nothing."""


class Cancelled(Exception):
    """The customer has cancelled the job."""


class Overdue(Exception):
    """The job has exceeded its maximum run time."""


class Stopping(Exception):
    """The worker has to stop, or the customer has paused the job."""


class Stalled(Exception):
    """The child still runs but has sent no message for too long."""

"""Run one claimed attempt: fill the folder, run the child, keep the lease, and write how the attempt ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from threading import Event, Lock, Thread
from typing import TypeVar

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from app import objects
from app.checkpoints.records import last_stored_step
from app.db import read, transaction, why
from app.db.tables import TERMINAL, Job
from app.errors import AppError
from app.jobs import lease, transitions
from app.jobs.lease import Claim
from app.ops import tracing
from app.settings import Settings
from app.storage import Storage
from spard.config.patience import Patience
from worker.embedding_shards import EmbeddingShards
from worker.failures import (
    DISK_FULL,
    FAULTS,
    Failed,
    Failure,
    Fault,
    MemoryKills,
    failure,
    is_job_s_own,
    outer_failure,
    why_killed,
)
from worker.heartbeat import STORAGE, Heart, Meter
from worker.inputs import fill
from worker.listener import DATABASE_AWAY, Cancelled, Listener, Lost, Overdue, Stalled, Stopping
from worker.metrics import LOST, StageClock, WorkerMetrics
from worker.process import Child
from worker.progress import Journal
from worker.results import CheckpointArchives, Keeper, attempt_prefix, delete_kept, upload
from worker.sinks.feed import open_sinks
from worker.workdir import Folder, new_folder

# Wait for storage that is away inside an attempt, while its lease is kept and its owner can still cancel it.

_LOOK_S = 1.0  # between two looks at whether the attempt is to end
_T = TypeVar("_T")

log = structlog.get_logger(__name__)


@contextmanager
def call_if_slow(seconds: float, tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once, in another thread, if the block takes longer than `seconds`; wait for the call at its end."""
    is_over = Event()

    def watch() -> None:
        if not is_over.wait(seconds):
            tell()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


@dataclass(frozen=True, slots=True)
class OutageWaiter:
    """Retries calls that fail because of the surroundings, such as the storage.

    first_s, longest_s  the first and the longest wait in seconds; each wait is twice the one before
    note                called with each failure before the wait
    go_on               called about once a second during a wait; raises to end the attempt
    ended               an event that ends the current wait early
    clock               returns seconds
    """

    first_s: float
    longest_s: float
    note: Callable[[Failure], None]
    go_on: Callable[[], None]
    ended: Event
    clock: Callable[[], float] = time.monotonic

    def insist(self, do: Callable[[], _T], limit_s: float) -> _T:
        """Call `do` until it succeeds and return its result; raise its last error once the waits add up to `limit_s`.

        An error with a fault other than the surroundings is raised at once.
        """
        waits = Patience(limit_s, self.first_s, self.longest_s).waits()
        while True:
            try:
                return do()
            except AppError as error:
                what, wait_s = failure(error), next(waits, None)
                if what.fault is not Fault.surroundings or wait_s is None:
                    raise
                log.warning("waiting", code=what.code, seconds=wait_s, why=str(error))
            self.note(what)
            self._wait(wait_s)

    def _wait(self, seconds: float) -> None:
        until = self.clock() + seconds
        self.go_on()
        while (left := until - self.clock()) > 0:
            self.ended.wait(min(left, _LOOK_S))
            self.go_on()


# The database writes that end a failed attempt, with their delays and wording.

_LONGEST_KILL_WAIT_S = 900.0
_AVOID_S = {"disk_full": 600.0, "model_not_found": 600.0}  # a job that may do better elsewhere is left to others

Ending = Callable[[Session], bool]  # the write that ends an attempt; False when the lease was lost


def after_kill(settings: Settings, claim: Claim, job: Job, what: Failure) -> Ending:
    """Return the write that queues a killed job again after minutes, if possible for another worker.

    The delay doubles with each stop of the job. The cause of the kill may pass, or exist on this machine only.
    """
    delay_s = min(settings.killed_wait_s * 2.0 ** (transitions.count_stops(job) - 1), _LONGEST_KILL_WAIT_S)
    reason, error = as_clause(what), what.error()
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, avoid_s=2 * delay_s)


def after_failure(
    settings: Settings, claim: Claim, job: Job, reason: str, what: Failure | None = None, *, blames_job: bool
) -> Ending:
    """Return the write that queues a failed job again after a short delay, which doubles with each stop.

    `blames_job`: nothing outside the job explains the failure, so a second failure at the same place ends the job.
    """
    delay_s = settings.poll_s * 2.0 ** (transitions.count_stops(job) - 1)
    error, avoid_s = (what.error(), _AVOID_S.get(what.code, 0.0)) if what else (None, 0.0)
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, blames_job=blames_job, avoid_s=avoid_s)


def as_clause(what: Failure) -> str:
    """Return a failure's message without capital and period, to end another sentence."""
    return what.message[:1].lower() + what.message[1:].rstrip(".")


def exit_text(code: int) -> str:
    """Describe an exit code: "signal N" for a negative one, else "exit status N"."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Backend:
    """The state that all attempts of a worker share."""

    settings: Settings
    engine: Engine
    storage: Storage
    key: Ed25519PrivateKey  # signs adapters
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)


class Attempt:
    """Runs one claim.

    take_child   returns a child process for a folder, warm if there is one
    stop         set when the worker has to end
    is_worker_s  returns True if this worker, rather than the job, causes a failure

    After `run`, `trouble` is the failure that was not the job's own fault, or None.
    """

    def __init__(
        self,
        backend: Backend,
        claim: Claim,
        take_child: Callable[[Folder], Child],
        stop: Event,
        is_worker_s: Callable[[Failure], bool] = lambda what: False,
    ) -> None:
        self._backend, self._claim, self._take_child, self._stop = backend, claim, take_child, stop
        self._is_worker_s = is_worker_s
        self._settings = settings = backend.settings
        self._log = structlog.get_logger(__name__).bind(job_id=claim.job_id, token=claim.token)
        self._stages = StageClock(backend.metrics)
        self._child: Child | None = None
        self.trouble: Failure | None = None
        self.job = self._read_job()
        with read(backend.engine) as session:
            self._taken_until = last_stored_step(session, claim.job_id)
        self._of_job = settings, claim, self.job
        self._log = self._log.bind(request_id=self.job.spec.request_id)
        self._meter = Meter()
        times = settings.lease_s, settings.heartbeat_s
        self._heart = Heart(backend.engine, claim, *times, self._end_child, self._meter)
        self._journal, self._telling = Journal(claim, self.job.warnings or [], self.job.stage_costs), Lock()
        waits = settings.poll_s, settings.gpu_probe_s
        self._waiting = OutageWaiter(*waits, self._note_wait, self._raise_if_stopped, self._heart.lost)

    def run(self) -> None:
        """Run the attempt until its job has ended, is queued again, or another worker holds the lease."""
        self._log.info("attempt", number=self._claim.attempt)
        began, job_id, number = time.monotonic(), self._claim.job_id, self._claim.attempt
        with tracing.continue_trace("attempt", self.job.spec.traceparent, job_id, number) as span, self._heart:
            is_ours = self._run()
            job = self._read_job()
            outcome = job.status.value if is_ours else LOST
            span.set_attribute("spard.outcome", outcome)
        self._backend.metrics.note_attempt(outcome, time.monotonic() - began)
        if is_ours and job.status in TERMINAL and job.safety:
            self._backend.metrics.note_decision(job.safety["gate"]["decision"])
        self._log.info("attempt ended", status=job.status.value)
        if job.status in TERMINAL:
            delete_kept(job.checkpoint["files"] if job.checkpoint else (), self._discard)

    def _run(self) -> bool:
        """Do the work and write its ending; return False when the lease was lost."""
        try:
            self._settle(self._work_out_ending())
        except Lost:
            self._log.warning("the lease is lost")
            return False
        finally:
            self._stages.end()
        return True

    def _work_out_ending(self) -> Ending:
        """Do the work and return the write that ends the attempt."""
        try:
            with new_folder(self._settings.work_dir(), f"{self._claim.job_id}-a{self._claim.token}") as folder:
                return self._work(folder)
        except Lost:
            raise
        except Cancelled:
            return lambda session: lease.confirm_cancel(session, self._claim)
        except Stopping:
            return lambda session: lease.release(session, self._claim, "the worker stops")
        except Overdue:
            return lambda session: lease.fail_overdue(session, self._claim)
        except Stalled:
            return after_failure(
                self._settings,
                self._claim,
                self.job,
                f"there was no progress for {self._settings.stall_s:g} s",
                blames_job=True,
            )
        except Failed as error:
            return self._end_failed(error.what, blames_job=is_job_s_own(error.what.code))
        except Exception as error:  # whatever it is, the job is not left hanging
            self._log.exception("the attempt broke off")
            return self._end_failed(failure(error))

    def _work(self, folder: Folder) -> Ending:
        storage, job, claim = self._backend.storage, self.job, self._claim
        filled = partial(fill, folder, job, storage, self._settings, self._raise_if_stopped, self._taken_until)
        self._waiting.insist(filled, self._settings.outage_patience_s)
        shards = EmbeddingShards(storage, self._backend.engine, job, folder)
        self._waiting.insist(partial(shards.fetch, self._raise_if_stopped), self._settings.outage_patience_s)
        prefix = attempt_prefix(job, claim.token)
        keeper = Keeper(storage, prefix, folder, job.checkpoint, self._discard)
        checkpoints = CheckpointArchives(storage, job.id, prefix, folder, self._backend.key)
        sinks, kills = open_sinks(job, self._settings), (memory := MemoryKills()).read()
        # `kills` was read before the child starts: a later count above it means that the kernel killed for memory.
        self._child = child = self._take_child(folder)
        try:
            child.work(folder, job_id=claim.job_id, request_id=job.spec.request_id)
            heard = self._journal, keeper, checkpoints, self._heart, self._stages, sinks, shards
            self._meter.resume()
            last_word = Listener(child, folder, *heard, self._settings, self._meter).listen(self._stop)
            sinks.hear_end(folder.safety, last_word)
        finally:
            self._meter.pause(STORAGE)
            sinks.close()
            self._end_child()
        match last_word:
            case {"kind": "done"}:
                # Wait without a limit: a finished training is not discarded because the storage is unavailable.
                store = partial(upload, storage, job, claim, folder, self._backend.key)
                note = partial(self._write_news, self._journal.note_slow_storage)
                with call_if_slow(self._settings.storage_notice_s, note):
                    return self._waiting.insist(store, inf)
            case {"kind": "failed", "code": "stopped"}:
                raise Stopping
            case {"kind": "failed", "code": code, "message": message, "param": param, "retryable": retryable}:
                raise Failed(outer_failure(code) if code in FAULTS else Failure(code, message, param, retryable))
            case _ if self._stop.is_set() or self._heart.pause_requested.is_set():
                raise Stopping
            # Our own kill also ends the child by SIGKILL; `_stop` and the pause above have excluded that case.
            case _ if child.exit_code == -signal.SIGKILL:
                self._log.warning("the training process was killed", memory=memory.describe())
                return after_kill(*self._of_job, why_killed(memory.memory_at_kill(kills)))
            case _:
                reason = f"the training process ended by itself ({exit_text(child.exit_code)})"
                return after_failure(*self._of_job, reason, blames_job=True)

    def _end_failed(self, what: Failure, *, blames_job: bool = False) -> Ending:
        """Return the ending for a failure: a retry, a release, or the job's end.

        The attempt's folder is deleted by now, so a disk that is full at this point is not full of this job's files.
        """
        if what.is_unforeseen and self._is_worker_s(DISK_FULL):
            what = DISK_FULL
        self.trouble = None if what.fault is Fault.job else what
        if what.code == "judge_unavailable":
            self._backend.metrics.note_judge_failure()
        if what.is_kill:
            return after_kill(*self._of_job, what)
        if what.fault is Fault.surroundings or (what.fault is Fault.worker and self._is_worker_s(what)):
            return lambda session: lease.release(session, self._claim, as_clause(what), waits=True)
        if what.retryable:
            return after_failure(*self._of_job, what.message, what, blames_job=blames_job)
        return lambda session: lease.fail(session, self._claim, what.error())

    def _note_wait(self, what: Failure) -> None:
        """Tell the job's owner, once for each cause, why the attempt waits."""
        self._write_news(partial(self._journal.note_wait, what.code))

    def _write_news(self, note: Callable[[], None]) -> None:
        with self._telling:
            note()
            if self._journal.has_news:
                with suppress(*DATABASE_AWAY):
                    self._heart.beat(self._journal.write)
                    self._journal.clear()

    def _settle(self, ending: Ending) -> None:
        """Write the last news and the ending in one transaction, retrying while the database is away.

        Raises `Lost` when the lease has ended or belongs to another worker.
        """
        while True:
            try:
                with transaction(self._backend.engine) as session:
                    if not lease.holds(session, self._claim):
                        raise Lost
                    self._heart.extend(session)
                    self._journal.write(session)
                    if not (lease.cancel_if_asked(session, self._claim) or ending(session)):
                        raise Lost
                return
            except DATABASE_AWAY as error:
                self._log.warning("the database does not answer", error=why(error))
                if self._heart.lost.wait(_RETRY_S):
                    raise Lost from error

    def _raise_if_stopped(self) -> None:
        """Raise `Lost`, `Cancelled`, `Overdue` or `Stopping` if one of them applies."""
        if self._heart.lost.is_set():
            raise Lost
        if self._heart.cancel_requested.is_set():
            raise Cancelled
        if self._heart.is_overdue.is_set():
            raise Overdue
        if self._stop.is_set() or self._heart.pause_requested.is_set():
            raise Stopping

    def _discard(self, keys: Sequence[str]) -> None:
        begin = partial(transaction, self._backend.engine)
        objects.discard(self._backend.storage, begin, keys, self.job.project_id, self.job.id)

    def _end_child(self) -> None:
        if self._child:
            self._child.kill()

    def _read_job(self) -> Job:
        with read(self._backend.engine) as session:
            return session.get_one(Job, self._claim.job_id)

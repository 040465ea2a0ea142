"""One claim from its first download to its last row: a folder, a child, a lease, and how the attempt ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from app import traces
from app.db import read, transaction
from app.jobs import lease
from app.jobs.lease import Claim
from app.models import TERMINAL, Job
from app.settings import Settings
from app.storage import Storage
from worker.failures import GPU_BROKE, OUT_OF_MEMORY, Failure, failure, is_job_s_own
from worker.figures import LOST, Figures
from worker.folder import Folder, new_folder
from worker.heart import Heart
from worker.inputs import fill
from worker.interrupts import DATABASE_AWAY, Cancelled, Lost, Overdue, Stalled, Stopping
from worker.journal import Journal
from worker.keeper import Keeper, delete_kept
from worker.listener import Listener
from worker.memory import oom_kills
from worker.process import Child
from worker.results import attempt_prefix, upload
from worker.watch import Watch

_RETRY_S = 1.0

Ending = Callable[[Session], bool]  # the write that ends an attempt; False when the lease was lost


@dataclass(frozen=True, slots=True)
class Backend:
    """The state that all attempts of a worker share."""

    settings: Settings
    engine: Engine
    storage: Storage
    key: Ed25519PrivateKey  # signs adapters
    figures: Figures = field(default_factory=Figures)


class Attempt:
    """Runs one claim. `take_child` gives a child that waits for a folder; `stop` is set when the worker is to end."""

    def __init__(self, backend: Backend, claim: Claim, take_child: Callable[[], Child], stop: Event) -> None:
        self._backend, self._claim, self._take_child, self._stop = backend, claim, take_child, stop
        self._settings = settings = backend.settings
        self._log = structlog.get_logger(__name__).bind(job_id=claim.job_id, token=claim.token)
        self._watch = Watch(backend.figures)
        self._child: Child | None = None
        self.gpu_broke = False  # by what the child said last
        self._job = self._read_job()
        self._log = self._log.bind(request_id=self._job.spec.get("request_id"))
        self._heart = Heart(backend.engine, claim, settings.lease_s, settings.heartbeat_s, self._end_child)
        self._journal = Journal(claim, self._job.warnings or [])

    def run(self) -> None:
        """Work until the job has ended, is queued again, or is no longer ours."""
        self._log.info("attempt", number=self._claim.attempt)
        began, job_id, number = time.monotonic(), self._claim.job_id, self._claim.attempt
        with traces.continued("attempt", self._job.spec.get("traceparent"), job_id, number) as span, self._heart:
            is_ours = self._run()
            job = self._read_job()
            outcome = job.status.value if is_ours else LOST
            span.set_attribute("spard.outcome", outcome)
        self._backend.figures.note_attempt(outcome, time.monotonic() - began)
        self._log.info("attempt ended", status=job.status.value)
        if job.status in TERMINAL:
            delete_kept(self._backend.storage, job.checkpoint)

    def _run(self) -> bool:
        """Work and write the ending; False when the lease was lost."""
        try:
            self._settle(self._work_out_ending())
        except Lost:
            self._log.warning("the lease is lost")
            return False
        finally:
            self._watch.end()
        return True

    def _work_out_ending(self) -> Ending:
        """Do the work, and say what is to be written about how it ended."""
        try:
            with new_folder(self._settings.work_dir(), f"{self._claim.job_id}-a{self._claim.token}") as folder:
                return self._work(folder)
        except Lost:
            raise
        except Cancelled:
            return lambda session: lease.cancelled(session, self._claim)
        except Stopping:
            return lambda session: lease.release(session, self._claim, "the worker stops")
        except Overdue:
            return lambda session: lease.fail_overdue(session, self._claim)
        except Stalled:
            return self._again(f"there was no progress for {self._settings.stall_s:g} s", blames_job=True)
        except Exception as error:  # whatever it is, the job is not left hanging
            self._log.exception("the attempt broke off")
            return self._failed(failure(error))

    def _work(self, folder: Folder) -> Ending:
        storage, job, claim = self._backend.storage, self._job, self._claim
        fill(folder, job, storage, self._settings, self._go_on)
        keeper = Keeper(storage, attempt_prefix(job, claim.token), folder, job.checkpoint)
        kills = oom_kills()
        self._child = child = self._take_child()
        try:
            child.work(folder.root, job_id=claim.job_id, request_id=job.spec.get("request_id"))
            last_word = self._listener(child, folder, keeper).listen(self._stop)
        finally:
            self._end_child()
        match last_word:
            case {"kind": "done"}:
                return upload(storage, job, claim, folder, self._backend.key)
            case {"kind": "failed", "code": "stopped"}:
                raise Stopping
            case {"kind": "failed", "code": GPU_BROKE.code}:
                self.gpu_broke = True
                return self._failed(GPU_BROKE, blames_job=True)
            case {"kind": "failed", "code": code, "message": message, "param": param, "retryable": retryable}:
                return self._failed(Failure(code, message, param, retryable), blames_job=is_job_s_own(code))
            case _ if self._stop.is_set() or self._heart.pause_requested.is_set():
                raise Stopping
            case _ if child.exit_code == -signal.SIGKILL and oom_kills() > kills:
                return self._failed(OUT_OF_MEMORY, blames_job=True)
            case _:
                reason = f"the training process ended by itself ({_exit(child.exit_code)})"
                return self._again(reason, blames_job=True)

    def _listener(self, child: Child, folder: Folder, keeper: Keeper) -> Listener:
        return Listener(child, folder, self._journal, keeper, self._heart, self._watch, self._settings)

    def _failed(self, what: Failure, *, blames_job: bool = False) -> Ending:
        if what.retryable:
            return self._again(what.message, what, blames_job=blames_job)
        return lambda session: lease.fail(session, self._claim, what.error())

    def _again(self, reason: str, what: Failure | None = None, *, blames_job: bool) -> Ending:
        delay_s = self._settings.poll_s * 2 ** (self._claim.attempt - 1)
        error = what.error() if what else None
        return lambda session: lease.requeue(session, self._claim, delay_s, reason, error, blames_job=blames_job)

    def _settle(self, ending: Ending) -> None:
        """Write the last news and the ending together; wait for a database that is away while the lease is ours."""
        while True:
            try:
                with transaction(self._backend.engine) as session:
                    if not lease.holds(session, self._claim):
                        raise Lost
                    self._journal.write(session)
                    if not ending(session):
                        raise Lost
                return
            except DATABASE_AWAY as error:
                self._log.warning("the database does not answer", error=type(error).__name__)
                if self._heart.lost.wait(_RETRY_S):
                    raise Lost from error

    def _go_on(self) -> None:
        """Raise what keeps us from going on."""
        if self._heart.lost.is_set():
            raise Lost
        if self._heart.cancel_requested.is_set():
            raise Cancelled
        if self._stop.is_set() or self._heart.pause_requested.is_set():
            raise Stopping

    def _end_child(self) -> None:
        if self._child:
            self._child.kill()

    def _read_job(self) -> Job:
        with read(self._backend.engine) as session:
            return session.get_one(Job, self._claim.job_id)


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"

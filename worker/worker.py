"""The worker's main loop: take queued jobs one after the other until it has to stop. There is one process per GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from enum import IntEnum
from functools import partial
from importlib.metadata import version
from queue import Empty, SimpleQueue
from threading import Event, Thread

import structlog
from sqlalchemy import ColumnElement, Engine
from sqlalchemy.exc import SQLAlchemyError

from app import locked_folders
from app.db import make_engine, read, transaction, why
from app.db.tables import Job, JobStatus
from app.db.tables.jobs import PRESENCE_EVERY_S
from app.jobs import events, fleet, lease, scheduling
from app.jobs.fleet import Presence
from app.jobs.lease import Claim
from app.jobs.needs import Room
from app.ops import preflight
from app.ops.lifecycle import repeat
from app.settings import Settings
from app.signing import signing_key
from app.storage import open_storage
from spard.config.checks import vllm_version
from worker import gpu, heartbeat
from worker.attempt import Attempt, Backend
from worker.fitness import Fitness, check_disk, look
from worker.metrics import serve_metrics
from worker.nodes import Nodes
from worker.process import COMMAND, Child, environment
from worker.protocol import ModelRequest, prefetch_key
from worker.sandbox import ChildSandbox
from worker.sinks import feed
from worker.workdir import Folder, read_assignment

log = structlog.get_logger(__name__)


class Exit(IntEnum):
    """Exit codes of a worker that serves one job. They are hints: only the job's row is decisive."""

    done = 0  # the attempt has ended: the job has succeeded, was cancelled or paused, or waits for another attempt
    failed = 1  # the job has failed, or this worker has
    nothing = 3  # the job is not queued any more, or not for this attempt or this machine


class Worker:
    """Serves jobs: `run` until `end` is called, `run_one` a single job.

    The constructor raises `Unfit` if this machine cannot serve jobs. Children die with the thread that runs `run` or
    `run_one`. `wake` and `end` may be called from a signal handler.
    """

    def __init__(self, settings: Settings, command: Sequence[str] = COMMAND, probe: Sequence[str] = gpu.PROBE) -> None:
        preflight.check(settings)
        check_disk(settings)
        heartbeat.check(settings)
        gpu.check(settings)
        feed.check(settings)
        self._room = gpu.room(settings)
        self._stop = Event()
        self._wakes: SimpleQueue[None] = SimpleQueue()  # unlike an Event it may be set while it is being set
        self._settings = settings
        storage = open_storage(settings.storage(), settings.s3_endpoint_url)
        self._backend = Backend(settings, make_engine(settings.database()), storage, signing_key(settings))
        self._reaper_rounds = lease.ReaperRounds()
        self._fitness = Fitness(settings, self._backend.metrics, environment(settings), probe)
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._cell = ChildSandbox.from_settings(settings)
        self._warm_pool = _WarmPool(command, environment(settings), self._cell, warm=settings.warm_child)

    @property
    def is_fit(self) -> bool:
        """Return True while nothing that every job needs is known to be broken; else no job is taken."""
        return self._backend.metrics.is_fit

    def run(self) -> None:
        """Serve jobs until `end`; without a job that is ready, wait for a wake-up or the poll interval."""
        with self._working():
            while not self._stop.is_set():
                if not self._serve():
                    self._rest()

    def run_one(self, job_id: str, token: int | None = None) -> Exit:
        """Serve this one job if it can start; with `token`, only while that is the token of its lease."""
        with self._working(), closing(Nodes(self._settings, job_id, token)) as nodes:
            is_ready = nodes.gather(self._stop) and not self._stop.is_set()
            claim = self._claim(scheduling.of_attempt(job_id, token)) if is_ready else None
            if claim is None:
                log.info("nothing to claim", job=job_id, token=token)
                return Exit.nothing
            self._attempt(claim, nodes).run()
            with read(self._backend.engine) as session:
                job = session.get(Job, job_id)
                return Exit.failed if job is not None and job.status == JobStatus.failed else Exit.done

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Run the worker's services during the block: presence, metrics, reaper and warm child; then end the worker."""
        with serve_metrics(self._backend.metrics, self._settings.metrics_port):
            yield from self._run_services()

    def _run_services(self) -> Iterator[None]:
        log.info("worker started", owner=self._owner)
        if missing := self._cell.missing:
            log.warning("children are not fully isolated; suites that run programs need namespaces", missing=missing)
        if self._settings.audit_engine.name == "vllm" and vllm_version() is None:
            log.warning("vLLM is not installed here: transformers answers the audits")
        locked_folders.remove_abandoned(self._settings.work_dir())
        reaper = Thread(target=self._reap_loop, daemon=True)
        herald = Thread(target=self._tell, daemon=True)
        for thread in (reaper, herald):
            thread.start()
        try:
            self._warm_pool.prepare()
            yield
        finally:
            self.end()
            self._warm_pool.close()
            reaper.join()
            herald.join()
            self._backend.engine.dispose()
        log.info("worker stopped", owner=self._owner)

    def wake(self) -> None:
        """Look for a job now, instead of at the next poll."""
        self._wakes.put(None)

    def end(self) -> None:
        """Stop soon: a running job saves a resume state and goes back to the queue."""
        self._stop.set()
        self.wake()

    def _rest(self) -> None:
        """Wait for a wake-up or the poll interval; several wake-ups at once count as one."""
        with suppress(Empty):
            self._wakes.get(timeout=self._settings.poll_s)
            while True:
                self._wakes.get_nowait()

    def _serve(self) -> bool:
        """Serve the next job; return False if there is none, or after an unforeseen error."""
        try:
            claim = self._claim()
            if claim:
                attempt = self._attempt(claim)
                seen = look(attempt.job.spec.model.source)
                attempt.run()
                if attempt.trouble:
                    self._fitness.note(attempt.trouble, attempt.job, seen)
                    self._fitness.await_fit(self._stop)
        except Exception:  # one job's trouble, or the database's, is not the end of the worker
            log.exception("could not serve")
            return False
        return claim is not None

    def _attempt(self, claim: Claim, nodes: Nodes | None = None) -> Attempt:
        take_child = partial(self._warm_pool.take, nodes)
        return Attempt(self._backend, claim, take_child, self._stop, self._fitness.is_at_fault)

    def _claim(self, only: ColumnElement[bool] | None = None) -> Claim | None:
        """Claim a job, or return None; count it as rescued if its last worker died or froze."""
        with transaction(self._backend.engine) as session:
            times = self._settings.lease_s, self._settings.max_run_s
            claim = lease.claim(session, self._owner, *times, self._fitness.lacks(), self._room, only)
            is_rescue = claim is not None and claim.token > 1 and events.was_abandoned(session, claim.job_id)
        if is_rescue:
            self._backend.metrics.note_rescue()
        return claim

    def _reap_loop(self) -> None:
        repeat(self._reap, self._stop, self._settings.reap_s, "could not reap")

    def _tell(self) -> None:
        backend, every_s = self._backend, min(self._settings.heartbeat_s, PRESENCE_EVERY_S)
        report_presence(
            backend.engine, self._owner, self._room, lambda: backend.metrics.current_troubles, self._stop, every_s
        )

    def _reap(self) -> None:
        """Requeue jobs whose lease has ended; every worker does this for all jobs, and so does the API."""
        if lease.reap_once(self._backend.engine, self._reaper_rounds):
            self.wake()


class _WarmPool:
    """One warm child process, which has done its imports and read the previous job's base model.

    Each child does one job only, so nothing that a job leaves in memory can reach the next one.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], cell: ChildSandbox, *, warm: bool) -> None:
        self._command, self._environment, self._cell, self._warm = command, environment, cell, warm
        self._spare: Child | None = None

    def prepare(self, wanted: ModelRequest | None = None) -> None:
        if self._warm:
            self._spare = Child(self._command, self._environment, self._cell)
            if wanted:
                self._spare.read_ahead(wanted)

    def take(self, nodes: Nodes | None, folder: Folder) -> Child:
        """Return the warm child if it is alive, else a new one, and start the next warm child.

        The next one reads the base model of this folder's job ahead, unless the job has other machines (`nodes`): a
        worker with those serves one job only.
        """
        spare, self._spare = self._spare, None
        if spare and not spare.is_alive:
            spare.kill()
            spare = None
        child = spare or Child(self._command, self._environment, self._cell)
        child.nodes = nodes
        self.prepare(prefetch_key(read_assignment(folder)) if nodes is None else None)
        return child

    def close(self) -> None:
        if self._spare:
            self._spare.kill()
            self._spare = None


# Record in the database that a worker is running, for the provider's view of the fleet.
#
# Nothing depends on these rows: only leases decide which worker has a job.


def report_presence(
    engine: Engine, name: str, room: Room, troubles: Callable[[], Iterable[str]], stop: Event, every_s: float
) -> None:
    """Write a worker's presence every `every_s` seconds until `stop` is set, and then that it has left."""
    host, ours, devices = socket.gethostname(), version("spard-service"), gpu.names()
    is_stopped = False
    while not is_stopped:
        is_stopped = stop.is_set()
        try:
            with transaction(engine) as session:
                if is_stopped:
                    fleet.leave(session, name)
                else:
                    has = room.memory_bytes, room.gpus
                    fleet.note(session, Presence(name, host, ours, devices, sorted(troubles()), *has))
        except SQLAlchemyError as error:
            log.warning("the worker's presence cannot be written to the database", error=why(error))
        stop.wait(every_s)

"""The status of a job: the allowed changes, `change_status`, which makes all of them, and requests of the job's owner.

```mermaid
stateDiagram-v2
    [*] --> queued
    queued --> running: a worker claims it
    queued --> paused: its owner pauses it
    queued --> cancelled: its owner cancels it
    queued --> failed: its deadline has passed, or its file cannot be trained on
    running --> succeeded: its audit passed
    running --> failed: its audit did not pass, or its last attempt failed, or its deadline has passed
    running --> queued: its attempt ended early, and another one follows
    running --> paused: its owner paused it, and its worker has stopped
    running --> cancelled: its owner cancelled it, and its worker has stopped
    paused --> queued: its owner resumes it
    paused --> cancelled: its owner cancels it
    failed --> succeeded: a waiver releases the adapter that its audit held back
    succeeded --> succeeded: another waiver renews the one that released its adapter, or it is ended
```

The API reports `cancelled` as soon as the owner cancels a running job (`Job.public_status`), and the job can then end
in no other way. `Job.phase` says what a running job does. `validating_files` is in OpenAI's list of statuses, but no
job has it, because files are validated when they are uploaded.

The attempts that a job has left are counted since its last progress: a new resume state at a later step, or the output
of a stage that had none. Progress resets the count, so a long job may lose its worker any number of times as long as it
advances. A failure of the surroundings (storage, judge, hub) costs no attempt but makes the job wait longer each time.
Callers hold the lock on every job row that they pass in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, ScalarResult, case, select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from app.db import now, timestamp
from app.db.base import utc_now
from app.db.tables import TERMINAL, Job, JobStatus
from app.db.tables.job_records import JobError, LastFailure, ResumeState
from app.help import job_cure
from app.jobs import events, scheduling
from app.webhooks.delivery import announce


@dataclass(frozen=True, slots=True)
class Transition:
    """An allowed change of status, and its cause."""

    source: JobStatus
    target: JobStatus
    cause: str


TRANSITIONS = (
    Transition(JobStatus.queued, JobStatus.running, "a worker claims it"),
    Transition(JobStatus.queued, JobStatus.paused, "its owner pauses it"),
    Transition(JobStatus.queued, JobStatus.cancelled, "its owner cancels it"),
    Transition(JobStatus.queued, JobStatus.failed, "its deadline has passed, or its file cannot be trained on"),
    Transition(JobStatus.running, JobStatus.succeeded, "its audit passed"),
    Transition(
        JobStatus.running,
        JobStatus.failed,
        "its audit did not pass, or its last attempt failed, or its deadline has passed",
    ),
    Transition(JobStatus.running, JobStatus.queued, "its attempt ended early, and another one follows"),
    Transition(JobStatus.running, JobStatus.paused, "its owner paused it, and its worker has stopped"),
    Transition(JobStatus.running, JobStatus.cancelled, "its owner cancelled it, and its worker has stopped"),
    Transition(JobStatus.paused, JobStatus.queued, "its owner resumes it"),
    Transition(JobStatus.paused, JobStatus.cancelled, "its owner cancels it"),
    Transition(JobStatus.failed, JobStatus.succeeded, "a waiver releases the adapter that its audit held back"),
    Transition(
        JobStatus.succeeded,
        JobStatus.succeeded,
        "another waiver renews the one that released its adapter, or it is ended",
    ),
)
_ALLOWED = frozenset((each.source, each.target) for each in TRANSITIONS)


class IllegalTransition(RuntimeError):
    """Raised for a change of status that is not in `TRANSITIONS`: a bug in the calling code."""


def change_status(
    session: Session,
    which: ColumnElement[bool],
    source: JobStatus,
    target: JobStatus,
    *,
    returning: Sequence[InstrumentedAttribute[Any]] = (),
    **columns: object,
) -> Row[Any] | None:
    """Change the status of the job matched by `which`, with other `columns`, in one conditional UPDATE.

    If the job ends, its project's webhooks are notified; if an attempt ends, its GPU time is charged to the project.
    Returns the job's id and the columns of `returning`, or None if no job matches `which` or it has left `source`.
    Raises `IllegalTransition` for a change that is not in `TRANSITIONS`.

        change_status(session, Job.id == job.id, JobStatus.paused, JobStatus.queued, run_after=0.0)
    """
    if (source, target) not in _ALLOWED:
        raise IllegalTransition(f"a job cannot go from {source} to {target}")
    counted = (Job.project_id, Job.gpu_seconds, Job.gpu_seconds_before)
    changed = session.execute(
        update(Job)
        .where(which, Job.status == source)
        .values(**_implied_columns(source, target) | columns)
        .returning(Job.id, *counted, *returning)
        .execution_options(synchronize_session="fetch")
    ).one_or_none()
    # An attempt has ended: what it used counts against its project's turns from now on.
    if changed is not None and source == JobStatus.running:
        scheduling.charge(session, changed.project_id, changed.gpu_seconds - changed.gpu_seconds_before)
    if changed is not None and _is_end(source, target):
        announce(session, changed.id, target)
    return changed


def lock_jobs(session: Session, which: ColumnElement[bool], skip_locked: bool = False) -> ScalarResult[Job]:
    """Select jobs in their current state and lock their rows until the transaction ends."""
    # Every caller locks in the order of ids, so two transactions cannot deadlock; `populate_existing` replaces what the
    # session has read before the lock.
    rows = select(Job).where(which).order_by(Job.id).with_for_update(skip_locked=skip_locked)
    return session.scalars(rows.execution_options(populate_existing=True))


def time_computed(computed_s: float | None = None) -> dict[str, object]:
    """Return the column values that set a running job's GPU time from the seconds that its attempt computed.

    They are at most those for which its lease was valid, and by default as many.
    """
    # A sum replaces the one before, so a heartbeat whose answer got lost may be repeated. The worker measures it by its
    # own clock, also after its lease has expired.
    leased = Job.leased_seconds + _seconds_since_seen()
    computed = leased if computed_s is None else case((leased < computed_s, leased), else_=computed_s)
    return {"gpu_seconds": Job.gpu_seconds_before + computed, "leased_seconds": leased, "seen_at": now()}


def time_used() -> dict[str, object]:
    """Return the column values that add a running job's GPU time since its last heartbeat, if it waits for nothing."""
    seconds = _seconds_since_seen()
    used = case((Job.waiting_for.is_(None), seconds), else_=0.0)
    return {"gpu_seconds": Job.gpu_seconds + used, "leased_seconds": Job.leased_seconds + seconds, "seen_at": now()}


def _seconds_since_seen() -> ColumnElement[float]:
    """Return the seconds since a running job's last heartbeat, up to now or up to the end of an expired lease."""
    # A worker whose lease has expired may be gone since then, so no later time is charged.
    until = case((Job.lease_expires_at < now(), Job.lease_expires_at), else_=now())
    is_later = (Job.status == JobStatus.running) & Job.seen_at.is_not(None) & (until > Job.seen_at)
    return case((is_later, until - Job.seen_at), else_=0.0)


def error_object(code: str, message: str) -> JobError:
    """Return OpenAI's error object."""
    return {"code": code, "message": message, "param": None}


def to_cancelled(session: Session, job: Job) -> None:
    """Cancel a locked job that no worker is running any more."""
    _change(session, job, JobStatus.cancelled)
    events.append(session, job.id, "info", "message", "Fine-tuning job cancelled")


def to_paused(session: Session, job: Job) -> None:
    """Pause a locked job that no worker is running any more.

    Its deadline is cleared, and the next claim sets a new one.
    """
    _change(session, job, JobStatus.paused, pause_requested_at=None, deadline_at=None)
    events.append(session, job.id, "info", "message", "Fine-tuning job paused")


def to_failed(session: Session, job: Job, error: JobError, **data: object) -> None:
    """Fail a locked job with OpenAI's error object; its event also contains `data`."""
    _change(session, job, JobStatus.failed, error=error)
    events.append(session, job.id, "error", "message", error["message"], {**error, **data})


def hand_back(
    session: Session,
    job: Job,
    reason: str,
    delay_s: float = 0.0,
    cause: JobError | None = None,
    *,
    is_last: bool = False,
    avoid_s: float = 0.0,
    is_counted: bool = True,
) -> None:
    """Requeue a locked, running job, or apply a pending cancel or pause, or fail it after its last attempt.

    The job is not claimed again within `delay_s` seconds, nor by the same worker within `avoid_s`. `cause` is the error
    of a job that fails; the default is `worker_lost`. With `is_last`, no attempt follows, however many are left.
    `is_counted` says that the attempt counts as a stop of the job.
    """
    stops = count_stops(job)
    if job.cancel_requested_at:
        to_cancelled(session, job)
    elif job.pause_requested_at:
        to_paused(session, job)
    elif has_more_attempts(job) and not is_last:
        avoided: dict[str, object] = {
            "excluded_worker_id": job.lease_owner if avoid_s else None,
            "excluded_until": now() + avoid_s,
        }
        avoided |= {"stops": stops} if is_counted else {}
        _change(session, job, JobStatus.queued, run_after=now() + delay_s, **avoided)
        message = f"Fine-tuning job moved back to the queue: {reason}"
        events.append(session, job.id, "warn", "message", message, {"reason": reason, "attempt": job.attempt})
    else:
        where = "coming further" if job.attempts_before_progress else "an end"
        message = f"The job stopped {times_stopped(stops)} without {where}: {reason}."
        if cause is not None and stops > 1:
            again = f"The job stopped {times_stopped(stops)} without {where}."
            cause = {**cause, "message": f"{cause['message']} {again}"}
        lost = error_object("worker_lost", f"{message} {job_cure('worker_lost')}")
        to_failed(session, job, cause or lost, reason=reason)


def _change(session: Session, job: Job, target: JobStatus, **columns: Any) -> None:
    change_status(session, Job.id == job.id, job.status, target, **columns)


def _implied_columns(source: JobStatus, target: JobStatus) -> dict[str, object]:
    """Return the column values that every change from `source` to `target` sets."""
    columns: dict[str, object] = {"status": target}
    if source == JobStatus.running:
        columns |= time_used() | {"lease_owner": None, "lease_expires_at": None, "waiting_for": None}
    if _is_end(source, target):
        columns |= {"finished_at": timestamp()}
    return columns


def _is_end(source: JobStatus, target: JobStatus) -> bool:
    """Return True if the change ends the job; a job that a waiver releases ended earlier."""
    return target in TERMINAL and source not in TERMINAL


# Requests of a job's owner while the job is unfinished: cancel, pause, resume.


def request_cancel(session: Session, job_id: str, *, audits_last: bool = False) -> JobStatus | None:
    """Cancel a queued or paused job at once, or ask the worker of a running job to stop.

    With `audits_last`, the worker first audits the checkpoints of the job's last epochs. The job ends as cancelled
    whatever its worker still does. Returns the job's status, or None if the job has ended, was cancelled before or does
    not exist.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        # The status changes when the worker has stopped; until then the API shows `cancelled` (`Job.public_status`).
        job.cancel_requested_at, job.audits_last = utc_now(), audits_last
        session.flush()
    else:
        to_cancelled(session, job)
    return job.status


def request_pause(session: Session, job_id: str) -> JobStatus | None:
    """Pause a queued job at once, or ask the worker of a running job to save a resume state and stop.

    Returns the job's status, or None if the job has ended or does not exist.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.pause_requested_at = job.pause_requested_at or utc_now()
        session.flush()
    elif job.status == JobStatus.queued:
        to_paused(session, job)
    return job.status


def resume(session: Session, job_id: str) -> JobStatus | None:
    """Return a paused job to its old place in the queue, or withdraw the pending pause of a running job.

    Returns the job's status, or None if the job has ended or does not exist.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    job.pause_requested_at = None
    session.flush()
    if job.status == JobStatus.paused:
        change_status(session, Job.id == job.id, JobStatus.paused, JobStatus.queued, run_after=0.0)
        events.append(session, job.id, "info", "message", "Fine-tuning job resumed, moving job to queued state")
    return job.status


def _lock_unfinished(session: Session, job_id: str) -> Job | None:
    # A job whose cancel is pending counts as ended: to its owner it already is.
    is_open = Job.status.not_in(TERMINAL) & Job.cancel_requested_at.is_(None)
    return lock_jobs(session, (Job.id == job_id) & is_open).one_or_none()


# Count how many attempts a job has left since its last progress, and how long it waits before the next one.

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_MOST_DOUBLINGS = 10  # far beyond the longest wait


def attempts_used(job: Job) -> int:
    """Return the number of attempts begun since the job's last progress."""
    return job.attempt - job.attempts_before_progress


def count_stops(job: Job) -> int:
    """Return how many times the job will have stopped since its last progress if its current attempt ends now."""
    return max((job.stops or 0) + 1, attempts_used(job))


def times_stopped(number: int) -> str:
    """Return a number of stops in words: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def has_more_attempts(job: Job) -> bool:
    """Return True if the job may make another attempt."""
    return attempts_used(job) < job.max_attempts


def attempt_suffix(attempt: int, base: int, most: int) -> str:
    """Return the suffix of the "job started" event that numbers a retry; empty for the first attempt.

    `base` is the number of attempts before the job's last progress, `most` the number of attempts allowed since then.
    """
    since = " since its last progress" if base else ""
    return f" again (attempt {attempt - base} of {most}{since})" if attempt > 1 else ""


def note_kept(job: Job, record: ResumeState) -> None:
    """Reset the attempt count if `record` shows progress: a later step than ever before, or a new stage output."""
    step = record["step"] or 0
    if step <= (job.furthest_step or 0) and _stages(record) <= _stages(job.checkpoint):
        return
    job.furthest_step = max(step, job.furthest_step or 0)
    job.attempts_before_progress, job.waits, job.stops, job.last_failure = job.attempt, 0, 0, None


def is_repeated(job: Job, reason: str) -> bool:
    """Record a failure that nothing around the job explains; return True if it equals the previous one.

    Two failures are equal if reason, stage and step are the same: a deterministic fault, which a retry cannot cure.
    """
    step = job.progress["step"] if job.progress else None
    failure: LastFailure = {"reason": reason, "phase": job.phase, "step": step}
    is_same = failure == job.last_failure
    job.last_failure = failure
    return is_same


def refund_attempt(job: Job) -> None:
    """Take back the current attempt, so that it does not count."""
    job.attempt -= 1
    # Progress may have been recorded within the attempt that is refunded; without the cap `attempts_used` is negative.
    job.attempts_before_progress = min(job.attempts_before_progress, job.attempt)


def next_wait_s(job: Job) -> float:
    """Count one more failure of the surroundings and return the seconds to wait: 5, 10, 20, ... up to 300."""
    job.waits += 1
    return min(_FIRST_WAIT_S * 2.0 ** min(job.waits - 1, _MOST_DOUBLINGS), _LONGEST_WAIT_S)


def _stages(record: ResumeState | None) -> set[str]:
    """Return the paths of the stage outputs that a resume state holds."""
    return {file["path"] for file in record["files"] if file["path"].startswith("stage/")} if record else set()

"""Count how many attempts a job has left since its last progress, and how long it waits before the next one.

Progress is a new resume state at a later step, or the output of a stage that had none. It resets the count, so a long
job may lose its worker any number of times as long as it advances. A failure of the surroundings (storage, judge, hub)
costs no attempt but makes the job wait longer each time. Callers hold the lock on every job row that they pass in.
"""

from __future__ import annotations

from app.db.tables import Job
from app.db.tables.job_records import LastFailure, ResumeState

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_MOST_DOUBLINGS = 10  # far beyond the longest wait


def attempts_used(job: Job) -> int:
    """Return the number of attempts begun since the job's last progress."""
    return job.attempt - job.attempts_before_progress


def stops(job: Job) -> int:
    """Return how many times the job will have stopped since its last progress if its current attempt ends now."""
    return max((job.stops or 0) + 1, attempts_used(job))


def times_stopped(number: int) -> str:
    """Return a number of stops in words: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def has_more(job: Job) -> bool:
    """Return True if the job may make another attempt."""
    return attempts_used(job) < job.max_attempts


def retry_suffix(attempt: int, base: int, most: int) -> str:
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

"""How many attempts a job has left, counted from the place it came furthest to; and how long it waits for the next.

A new resume state, or the output of a stage that had none, begins the count anew: a long job may be lost any number of
times as long as it comes further. What was not the job's fault costs no attempt, but makes it wait longer each time.
Rows that are taken here are locked.
"""

from __future__ import annotations

from app.db.tables import Job
from app.db.tables.job_records import LastFailure, ResumeState

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_MOST_DOUBLINGS = 10  # far beyond the longest wait


def attempts_used(job: Job) -> int:
    """Return how many attempts were begun since the job last came further."""
    return job.attempt - job.attempt_base


def stops(job: Job) -> int:
    """Return how often the job will have stopped since it last came further if its attempt ends now."""
    return max((job.stops or 0) + 1, attempts_used(job))


def times_stopped(number: int) -> str:
    """Say how often a job stopped."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def has_more(job: Job) -> bool:
    """Whether another attempt may follow."""
    return attempts_used(job) < job.max_attempts


def retry_suffix(attempt: int, base: int, most: int) -> str:
    """Say which attempt begins, if it is not the first."""
    since = " since it last came further" if base else ""
    return f" again (attempt {attempt - base} of {most}{since})" if attempt > 1 else ""


def note_kept(job: Job, record: ResumeState) -> None:
    """Begin the count anew if `record` holds more than the row: a later step than ever, or a further stage."""
    step = record["step"] or 0
    if step <= (job.furthest_step or 0) and _stages(record) <= _stages(job.checkpoint):
        return
    job.furthest_step = max(step, job.furthest_step or 0)
    job.attempt_base, job.waits, job.stops, job.last_failure = job.attempt, 0, 0, None


def is_repeated(job: Job, reason: str) -> bool:
    """Note a failure that nothing around the job explains; whether it is the same at the same place as the last one."""
    step = job.progress["step"] if job.progress else None
    failure: LastFailure = {"reason": reason, "phase": job.phase, "step": step}
    is_same = failure == job.last_failure
    job.last_failure = failure
    return is_same


def refund_attempt(job: Job) -> None:
    """Let the attempt that runs not count."""
    job.attempt -= 1
    job.attempt_base = min(job.attempt_base, job.attempt)


def next_wait_s(job: Job) -> float:
    """Return how long the job is to wait after one more failure of what is around it: twice as long each time."""
    job.waits += 1
    return min(_FIRST_WAIT_S * 2.0 ** min(job.waits - 1, _MOST_DOUBLINGS), _LONGEST_WAIT_S)


def _stages(record: ResumeState | None) -> set[str]:
    """Return the paths of what finished stages left."""
    return {file["path"] for file in record["files"] if file["path"].startswith("stage/")} if record else set()

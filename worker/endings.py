"""The database writes that end a failed attempt, with their delays and wording."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from app.db.tables import Job
from app.jobs import attempts, lease
from app.jobs.lease import Claim
from app.settings import Settings
from worker.failures import Failure

_LONGEST_KILL_WAIT_S = 900.0
_AVOID_S = {"disk_full": 600.0, "model_not_found": 600.0}  # a job that may do better elsewhere is left to others

Ending = Callable[[Session], bool]  # the write that ends an attempt; False when the lease was lost


def after_kill(settings: Settings, claim: Claim, job: Job, what: Failure) -> Ending:
    """Return the write that queues a killed job again after minutes, if possible for another worker.

    The delay doubles with each stop of the job. The cause of the kill may pass, or exist on this machine only.
    """
    delay_s = min(settings.killed_wait_s * 2.0 ** (attempts.stops(job) - 1), _LONGEST_KILL_WAIT_S)
    reason, error = as_clause(what), what.error()
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, avoid_s=2 * delay_s)


def after_failure(
    settings: Settings, claim: Claim, job: Job, reason: str, what: Failure | None = None, *, blames_job: bool
) -> Ending:
    """Return the write that queues a failed job again after a short delay, which doubles with each stop.

    `blames_job`: nothing outside the job explains the failure, so a second failure at the same place ends the job.
    """
    delay_s = settings.poll_s * 2.0 ** (attempts.stops(job) - 1)
    error, avoid_s = (what.error(), _AVOID_S.get(what.code, 0.0)) if what else (None, 0.0)
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, blames_job=blames_job, avoid_s=avoid_s)


def as_clause(what: Failure) -> str:
    """Return a failure's message without capital and period, to end another sentence."""
    return what.message[:1].lower() + what.message[1:].rstrip(".")


def exit_text(code: int) -> str:
    """Describe an exit code: "signal N" for a negative one, else "exit status N"."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"

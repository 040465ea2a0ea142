"""How an attempt ends: the write that says so, and its words."""

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
    """Try again after minutes, if possible on another worker: what killed the process may pass, or be only here."""
    delay_s = min(settings.killed_wait_s * 2.0 ** (attempts.stops(job) - 1), _LONGEST_KILL_WAIT_S)
    reason, error = as_clause(what), what.error()
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, avoid_s=2 * delay_s)


def after_failure(
    settings: Settings, claim: Claim, job: Job, reason: str, what: Failure | None = None, *, blames_job: bool
) -> Ending:
    """Try again soon. `blames_job`: nothing around the job explains it, so the same at the same place is the end."""
    delay_s = settings.poll_s * 2.0 ** (attempts.stops(job) - 1)
    error, avoid_s = (what.error(), _AVOID_S.get(what.code, 0.0)) if what else (None, 0.0)
    return lambda session: lease.requeue(session, claim, delay_s, reason, error, blames_job=blames_job, avoid_s=avoid_s)


def as_clause(what: Failure) -> str:
    """Return the message as the end of another sentence."""
    return what.message[:1].lower() + what.message[1:].rstrip(".")


def exit_text(code: int) -> str:
    """Say how a process has ended."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"

"""The service with one guard taken out: the suite must notice each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from app import quotas
from app.db.tables import Job, JobStatus, Quota
from app.jobs import lease, scheduling, transitions
from app.jobs.lease import Claim
from app.webhooks import delivery


def apply(name: str | None) -> None:
    """Take a guard out of this process."""
    if name:
        MUTANTS[name]()


def _no_token() -> None:
    def is_held(claim: Claim) -> Any:
        return (Job.id == claim.job_id) & (Job.status == JobStatus.running)

    lease._is_held = is_held


def _no_lock() -> None:
    """Neither the row's lock nor the condition of the UPDATE: each alone keeps two workers from one job."""
    locked, guarded = scheduling.select_first, transitions.change_status
    scheduling.select_first = lambda *about: _remove_lock(locked(*about))

    def change_without_guard(session: Session, which: Any, source: JobStatus, target: JobStatus, **rest: Any) -> Any:
        if target != JobStatus.running:
            return guarded(session, which, source, target, **rest)
        returning = rest.pop("returning", ())
        claimed = update(Job).where(which).values(**transitions._implied_columns(source, target) | rest)
        return session.execute(claimed.returning(Job.id, *returning)).one_or_none()

    transitions.change_status = change_without_guard


def _remove_lock(query: Any) -> Any:
    query._for_update_arg = None
    return query


def _publish_first() -> None:
    from worker import attempt, results

    upload = results.upload

    def late(storage: Any, *rest: Any) -> Any:
        delayed = _Delayed(storage)
        return upload(delayed, *rest)  # type: ignore[arg-type]

    attempt.upload = late  # type: ignore[attr-defined, assignment]  # the mutant stands in for the import


_LATE_S = 10.0  # longer than a loaded machine needs to end an attempt


class _Delayed:
    """A storage that says an object is there some time before it is."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def upload_file(self, key: str, path: Any) -> Any:
        from hashlib import sha256

        from app.storage import StoredObject

        content = path.read_bytes()
        threading.Timer(_LATE_S, self._storage.write, (key, [content])).start()
        return StoredObject(len(content), sha256(content).hexdigest())


def _no_quota_lock() -> None:
    quotas._lock_quota = lambda session, project_id: session.get(Quota, project_id)


def _no_second_word() -> None:
    send = delivery.Courier._send
    delivery.Courier._send = lambda self, task: replace(send(self, task), is_delivered=True)  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "no fencing token": _no_token,
    "no lock in the claim": _no_lock,
    "publish before upload": _publish_first,
    "no lock in the quota": _no_quota_lock,
    "no second try of a webhook": _no_second_word,
}

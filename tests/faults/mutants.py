"""The service with one guard taken out: the suite must notice each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.jobs import lease, turns
from app.jobs.lease import Claim
from app.models import Job, JobStatus
from app.quotas import service as quotas
from app.quotas.models import Quota
from app.webhooks import courier


def apply(name: str | None) -> None:
    """Take a guard out of this process."""
    if name:
        MUTANTS[name]()


def _no_token() -> None:
    def is_held(claim: Claim) -> Any:
        return (Job.id == claim.job_id) & (Job.status == JobStatus.running)

    lease._is_held = is_held  # type: ignore[assignment]


def _no_lock() -> None:
    locked = turns.first_of
    turns.first_of = lambda tenant_id: _unlocked(locked(tenant_id))


def _unlocked(query: Any) -> Any:
    query._for_update_arg = None
    return query


def _publish_first() -> None:
    from worker import attempt, results

    upload = results.upload

    def late(storage: Any, *rest: Any) -> Any:
        delayed = _Delayed(storage)
        return upload(delayed, *rest)  # type: ignore[arg-type]

    attempt.upload = late


_LATE_S = 1.0  # longer than a loaded machine needs to end an attempt


class _Delayed:
    """A storage that says an object is there some time before it is."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def upload_file(self, key: str, path: Any) -> Any:
        from hashlib import sha256

        from app.storage import Stored

        content = path.read_bytes()
        threading.Timer(_LATE_S, self._storage.write, (key, [content])).start()
        return Stored(len(content), sha256(content).hexdigest())


def _no_quota_lock() -> None:
    quotas._locked = lambda session, tenant_id: session.get(Quota, tenant_id)


def _no_second_word() -> None:
    send = courier.Courier._send
    courier.Courier._send = lambda self, task: replace(send(self, task), is_delivered=True)  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "no fencing token": _no_token,
    "no lock in the claim": _no_lock,
    "publish before upload": _publish_first,
    "no lock in the quota": _no_quota_lock,
    "no second try of a webhook": _no_second_word,
}

"""Wake-ups for workers: a message that only means "look at the table", so losing or forging one is harmless.

A wake-up is written to the outbox in the same transaction as the change it announces, and sent after the commit.
Without a broker it is dropped: workers poll the table anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Event

from celery import Celery
from kombu.exceptions import OperationalError
from sqlalchemy import Engine, delete, select, update
from sqlalchemy.orm import Session

from app.broker_address import read_broker_address
from app.db import read, timestamp, transaction
from app.db.tables import Outbox
from app.ops.lifecycle import repeat

WAKE = "worker.wake"
_BATCH = 100
_TRANSPORT = {
    "global_keyprefix": "spard:",
    "health_check_interval": 30,
    "socket_connect_timeout": 2,
    "socket_keepalive": True,
    "socket_timeout": 30,
    "visibility_timeout": 3600,
}

log = logging.getLogger(__name__)


def wake(session: Session, job_id: str) -> None:
    """Ask a worker to look for work once this transaction is committed."""
    session.add(Outbox(topic=WAKE, payload={"job_id": job_id}))


def make_celery(broker_url: str) -> Celery:
    """Return the Celery application that sends and receives wake-ups; it stores no results.

    Raises `Unfit` if the broker's URL cannot be used.
    """
    celery = Celery("spard", set_as_current=False)
    celery.conf.update(
        accept_content=["json"],  # accepting pickle lets whoever reaches the broker execute code
        task_serializer="json",
        task_ignore_result=True,
        result_backend=None,
        task_acks_late=False,  # the reaper recovers lost work, not the broker
        task_reject_on_worker_lost=False,
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5},
        broker_connection_timeout=2,
        **read_broker_address(broker_url).celery_settings(_TRANSPORT),
    )
    return celery


class Dispatcher:
    """Sends the outbox's wake-ups to the broker; several dispatchers may send one twice, which is harmless."""

    def __init__(self, engine: Engine, broker_url: str | None) -> None:
        self._engine = engine
        self._celery = make_celery(broker_url) if broker_url else None

    def send_pending(self) -> int:
        """Send a batch of unsent wake-ups, oldest first, until the broker fails; return how many were sent.

        Without a broker they are deleted, and 0 is returned.
        """
        with read(self._engine) as session:
            pending = session.scalars(select(Outbox).where(Outbox.sent_at.is_(None)).order_by(Outbox.id).limit(_BATCH))
            rows = pending.all()
        if self._celery is None:
            return self._drop(rows)
        sent = self._send(self._celery, rows)  # without an open session, as the broker may be slow
        if sent:
            with transaction(self._engine) as session:
                session.execute(update(Outbox).where(Outbox.id.in_(sent)).values(sent_at=timestamp()))
        return len(sent)

    def run(self, stop: Event, every_s: float = 0.5) -> None:
        """Send wake-ups every `every_s` seconds until `stop` is set."""
        repeat(self.send_pending, stop, every_s, "the outbox cannot be read; trying again")

    def _drop(self, rows: Sequence[Outbox]) -> int:
        """Delete wake-ups that have no broker to go to, and return 0."""
        if rows:
            with transaction(self._engine) as session:
                session.execute(delete(Outbox).where(Outbox.id.in_([row.id for row in rows])))
        return 0

    def _send(self, celery: Celery, rows: Sequence[Outbox]) -> list[int]:
        sent: list[int] = []
        for row in rows:
            try:
                celery.send_task(row.topic, [row.payload["job_id"]], ignore_result=True)
            except OperationalError as error:
                log.warning("the broker does not answer, %d wake-ups wait: %s", len(rows) - len(sent), error)
                break
            sent.append(row.id)
        return sent

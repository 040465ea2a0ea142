"""celery -A worker.celery_app worker --pool=solo -c 1 --without-gossip --without-mingle

The same worker, woken by messages. Jobs are served by one thread that also polls, so Celery's own loop is never
blocked, a lost message costs a poll interval, and a repeated or forged one wakes a worker that finds nothing to do.
"""

from __future__ import annotations

from threading import Thread
from typing import Any

from celery import signals

from app.queue import WAKE, make_celery
from app.settings import get_settings
from worker import logs
from worker.main import Worker


class _Service:
    """The worker inside a Celery process, from its start to its end."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._thread: Thread | None = None

    def start(self, **event: Any) -> None:
        self._worker = Worker(get_settings())
        self._thread = Thread(target=self._worker.run, name="worker")
        self._thread.start()

    def wake(self, job_id: str) -> None:
        """There may be work; which job it is the table says."""
        if self._worker:
            self._worker.wake.set()

    def end(self, **event: Any) -> None:
        if self._worker:
            self._worker.end()

    def wait(self, **event: Any) -> None:
        if self._thread:
            self._thread.join()


def _broker_url() -> str:
    url = get_settings().broker_url
    if url is None:
        raise SystemExit("SPARD_BROKER_URL is not set. Without a broker, run `python -m worker`: it polls.")
    return url.get_secret_value()


def _set_up_logs(**event: Any) -> None:
    logs.set_up()


service = _Service()
celery = make_celery(_broker_url())
celery.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_disable_prefetch=True,
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=1,
    worker_send_task_events=False,
)
celery.task(service.wake, name=WAKE)
signals.setup_logging.connect(_set_up_logs, weak=False)
signals.worker_ready.connect(service.start, weak=False)
signals.worker_shutting_down.connect(service.end, weak=False)
signals.worker_shutdown.connect(service.wait, weak=False)

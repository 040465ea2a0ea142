"""The worker for `celery -A worker.celery_app worker --pool=solo -c 1 --without-gossip --without-mingle`.

The same worker as `python -m worker`, woken by messages. One thread serves jobs and also polls, so Celery's own loop is
never blocked, a lost message costs one poll interval, and a repeated or forged message wakes a worker that finds no
job. The thread starts before Celery connects to its broker: without a broker, jobs are served and reaped all the same.
"""

from __future__ import annotations

import logging
import os
import signal
from threading import Thread
from typing import Any

from celery import Celery, signals

from app.errors import Unfit
from app.ops import logs, tracing
from app.ops.broker import WAKE, make_celery
from app.settings import Settings, get_settings
from worker.worker import Worker

log = logging.getLogger(__name__)


def _settings() -> Settings:
    try:
        return get_settings()
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


def _broker_url() -> str:
    url = _settings().broker_url
    if url is None:
        raise SystemExit("SPARD_BROKER_URL is not set. Without a broker, run `python -m worker`: it polls.")
    return url.get_secret_value()


def _ready_worker() -> Worker:
    try:
        tracing.set_up("spard-worker")
        return Worker(get_settings())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


def _celery() -> Celery:
    try:
        return make_celery(_broker_url())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


celery = _celery()
celery.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_disable_prefetch=True,
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=1,
    worker_send_task_events=False,
)
_worker = _ready_worker()


@celery.task(name=WAKE)  # type: ignore[untyped-decorator]
def wake(job_id: str) -> None:
    """Wake the worker; it looks for a job in the table and ignores the id."""
    _worker.wake()


def _run() -> None:
    try:
        _worker.run()
    except Exception as error:
        log.error("the worker broke down: %s", error, exc_info=not isinstance(error, Unfit))
        os.kill(os.getpid(), signal.SIGTERM)  # whoever supervises this process starts a new one


_thread = Thread(target=_run, name="worker")


def _set_up_logs(**event: Any) -> None:
    logs.set_up(get_settings().log_format)


def _start(**event: Any) -> None:
    _thread.start()


def _end(**event: Any) -> None:
    _worker.end()


def _wait(**event: Any) -> None:
    _thread.join()


signals.setup_logging.connect(_set_up_logs)
signals.celeryd_after_setup.connect(_start)
signals.worker_shutting_down.connect(_end)
signals.worker_shutdown.connect(_wait)

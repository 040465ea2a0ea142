"""Whole services: workers woken through a real broker, real training, objects in S3."""

from __future__ import annotations

import io
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import redis
from peft import PeftModel
from pydantic import SecretStr
from transformers import AutoModelForCausalLM

from app.db import transaction
from app.db.tables import JobStatus
from app.jobs import lease
from app.ops.broker import Dispatcher, wake
from tests import servers
from tests.narrowing import require
from tests.worker.shop import WAIT_S, Shop, wait_until

CELERY = (
    "celery",
    "-A",
    "worker.celery_app",
    "worker",
    "--pool=solo",
    "-c",
    "1",
    "--without-gossip",
    "--without-mingle",
)


@pytest.fixture
def celery(cloud_shop: Shop, redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker that has looked for work and would do so again only after a minute."""
    process = cloud_shop.start(*CELERY, broker_url=SecretStr(redis_url), poll_s=60.0, lease_s=30.0, warm_child=True)
    try:
        wait_until(lambda: bool(psutil.Process(process.pid).children()))
        time.sleep(1)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_message_wakes_a_worker_that_trains_once_however_often_it_is_sent(
    cloud_shop: Shop, redis_url: str, celery: subprocess.Popen[bytes], model: Path, tmp_path: Path
) -> None:
    job_id = cloud_shop.add_job(waived=True)
    send(cloud_shop, redis_url, "ftjob-unknown", job_id, job_id)
    job = cloud_shop.until_ended(job_id)
    assert (job.status, job.attempt, job.lease_token) == (JobStatus.succeeded, 1, 1), job.error
    archive = cloud_shop.content(require(job.adapter)["storage_key"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "adapter", filter="data")
    assert PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter" / f"{job_id}-adapter"
    )


def test_a_worker_that_starts_without_its_broker_serves_and_is_woken_later(cloud_shop: Shop) -> None:
    with broker_that_comes_late() as (url, come):
        process = cloud_shop.start(*CELERY, broker_url=SecretStr(url), poll_s=1.0)
        try:
            served = cloud_shop.until_ended(cloud_shop.add_job(waived=True))
            come()
            woken = cloud_shop.add_job(waived=True)
            send(cloud_shop, url, woken)
            with redis.Redis.from_url(url) as client:
                wait_until(lambda: not client.keys("spard:celery"))  # somebody took the message
            assert cloud_shop.until_ended(woken).status == served.status == JobStatus.succeeded
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()


def test_a_worker_that_never_finds_its_broker_reaps_and_stops(cloud_shop: Shop) -> None:
    lost = cloud_shop.add_job()
    with transaction(cloud_shop.engine) as session:
        assert lease.claim(session, "somebody who died", 60.0, None)
    cloud_shop.expire_lease(lost)
    url = f"redis://127.0.0.1:{servers.free_port()}/0"
    process = cloud_shop.start(*CELERY, broker_url=SecretStr(url))
    try:
        wait_until(lambda: any("lease_expired" in event for event in cloud_shop.events(lost)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def broker_that_comes_late() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a Valkey server, and what starts it."""
    port = servers.free_port()
    with ExitStack() as stack:

        def come() -> None:
            stack.enter_context(servers.redis(port))

        yield f"redis://127.0.0.1:{port}/0", come


def send(shop: Shop, redis_url: str, *job_ids: str) -> None:
    """Wake-ups as the service sends them."""
    with transaction(shop.engine) as session:
        for job_id in job_ids:
            wake(session, job_id)
    assert Dispatcher(shop.engine, redis_url).send_pending() == len(job_ids)

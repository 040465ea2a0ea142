"""Whole services: workers woken through a real broker, real training, objects in S3."""

from __future__ import annotations

import io
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peft import PeftModel
from pydantic import SecretStr
from transformers import AutoModelForCausalLM

from app.db import transaction
from app.models import JobStatus
from app.queue import Dispatcher, wake
from tests.worker.shop import Shop, until

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
        until(lambda: bool(psutil.Process(process.pid).children()))
        time.sleep(1)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
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
    archive = cloud_shop.content((job.adapter or {})["storage_key"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "adapter", filter="data")
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")


def send(shop: Shop, redis_url: str, *job_ids: str) -> None:
    """Wake-ups as the service sends them."""
    with transaction(shop.engine) as session:
        for job_id in job_ids:
            wake(session, job_id)
    assert Dispatcher(shop.engine, redis_url).send_pending() == len(job_ids)

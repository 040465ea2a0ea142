"""A whole worker in a process of its own, woken by Celery where the service has a broker; its children are scripted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import celery.apps.worker
import celery.bin.celery  # noqa: F401 - read before there is a worker, so that one starts in a moment

from app.ops import logs
from app.settings import get_settings
from tests.faults.storm_process import prepare
from tests.worker.scripted_child import STEADY
from tests.worker.shop import scripted_command
from worker import process, worker
from worker.__main__ import serve as serve_until_told
from worker.sandbox import AllowedPaths, allowed_paths
from worker.workdir import Folder

_CELERY = ("worker", "--pool=solo", "-c", "1", "--without-gossip", "--without-mingle")


def serve(folder: Path, environment: Mapping[str, str]) -> None:
    """Serve jobs under the settings of `environment` until a signal comes; children look into `folder` as well."""
    prepare(folder, environment, float(environment["SPARD_LEASE_S"]))

    def give_more(job: Folder) -> AllowedPaths:
        given = allowed_paths(job)
        return replace(given, readable=(*given.readable, str(folder)))

    vars(process)["given_to"] = give_more
    command = scripted_command(f"{STEADY}{folder}")
    if "SPARD_BROKER_URL" not in os.environ:
        logs.set_up(get_settings().log_format)
        served = worker.Worker(get_settings(), command)
        serve_until_told(served, served.run)
        return
    from worker import celery_app  # reads the settings

    celery_app._worker._warm_pool._command = command
    celery_app.celery.worker_main(list(_CELERY))

"""python -m app.launchers: start a process for each queued job on the cluster, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from threading import Event

import httpx2

from app.db import make_engine
from app.errors import Unfit
from app.launchers import kubernetes, reconcile
from app.launchers.reconcile import Away, Bounds
from app.ops import logs, preflight
from app.ops.lifecycle import repeat, until_told
from app.settings import Settings, read_settings
from spard.models.memory import GIB

log = logging.getLogger(__name__)


def main() -> None:
    """Run the launcher of the settings; exit with a message if it cannot run."""
    try:
        run(read_settings())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


def run(settings: Settings) -> None:
    """Reconcile jobs and cluster every `launch_s` seconds until a signal comes.

    Raises `Unfit` if SPARD_LAUNCHER is `workers`, or if service account, database or JobSet are missing.
    """
    if settings.launcher == "workers":
        raise Unfit("SPARD_LAUNCHER is 'workers': they find jobs by themselves, and nothing is launched.")
    http = kubernetes.client()
    preflight.check_database(settings)
    logs.set_up(settings.log_format)
    logs.quiet("httpx2")
    stop = Event()
    with http:
        until_told(partial(_run_loop, settings, http, stop), stop.set)
    log.info("ends; what the cluster has goes on")


def _run_loop(settings: Settings, http: httpx2.Client, stop: Event) -> None:
    engine = make_engine(settings.database())
    names = settings.launch_namespace, settings.launch_queue
    launcher = kubernetes.KubernetesLauncher(http, *names, settings.launch_nodes)
    with suppress(Away):  # `reconcile.look` will report it
        launcher.check()
    gib = settings.launch_gpu_gib
    gpu_bytes = None if gib is None else int(gib * GIB)
    bounds = Bounds(settings.launch_most, gpu_bytes, settings.launch_gpus_per_node, settings.launch_nodes)
    log.info("looks for jobs of namespace %s every %g s", settings.launch_namespace, settings.launch_s)
    repeat(partial(reconcile.look, engine, launcher, bounds), stop, settings.launch_s, "could not look")
    engine.dispose()


if __name__ == "__main__":
    main()

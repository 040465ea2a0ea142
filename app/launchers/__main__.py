"""python -m app.launchers: start a process for each queued job, as `SPARD_LAUNCHER` says, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
from functools import partial
from threading import Event
from types import FrameType

from app.db import make_engine
from app.errors import Unfit
from app.launchers import kubernetes, reconcile
from app.launchers.reconcile import Bounds
from app.ops import logs
from app.ops.periodic import repeat
from app.settings import Settings, read_settings
from spard.models.fit import GIB


def main() -> None:
    """Look again and again; exit with a message where nothing is to be launched."""
    try:
        run(read_settings())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None


def run(settings: Settings) -> None:
    """Look every `launch_s` seconds until a signal comes. `Unfit` unless a launcher is set."""
    if settings.launcher == "workers":
        raise Unfit("SPARD_LAUNCHER is 'workers': they find jobs by themselves, and nothing is launched.")
    if not (kubernetes.ACCOUNT / "token").is_file():
        raise Unfit(f"There is no service account's token at {kubernetes.ACCOUNT}: this runs in a pod of the cluster.")
    logs.set_up(settings.log_format)
    stop = Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    engine = make_engine(settings.database())
    with kubernetes.client() as http:
        launcher = kubernetes.KubernetesLauncher(http, settings.launch_namespace, settings.launch_queue)
        gib = settings.launch_gpu_gib
        bounds = Bounds(settings.launch_most, None if gib is None else int(gib * GIB))
        repeat(partial(reconcile.look, engine, launcher, bounds), stop, settings.launch_s, "could not look")
    engine.dispose()


if __name__ == "__main__":
    main()

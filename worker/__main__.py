"""python -m worker: serve jobs until SIGTERM or SIGINT; polls the table, so no broker is needed.

python -m worker --job ID [--token N]: claim that job alone, serve it and end with a code of `worker.worker.Exit`.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import TypeVar

from app.errors import Unfit
from app.ops import logs, tracing
from app.ops.supervisor import announce_ready
from app.settings import get_settings
from worker.worker import Worker

_LOOK_S = 1.0

Result = TypeVar("Result")


def main() -> None:
    """Serve jobs until a signal ends the worker; exit with a message where this machine cannot serve any."""
    asked = _asked()
    try:
        logs.set_up(get_settings().log_format)
        tracing.set_up("spard-worker")
        if asked.job is None and get_settings().nodes_per_job > 1:
            raise Unfit("SPARD_NODES_PER_JOB is for `--job`: a launcher gives one job its machines.")
        worker = Worker(get_settings())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None
    if asked.job is None:
        serve(worker, worker.run)
    else:
        raise SystemExit(serve(worker, lambda: worker.run_one(asked.job, asked.token)))


def serve(worker: Worker, work: Callable[[], Result]) -> Result:
    """Do a worker's work in a thread of its own, so that signals, which the main thread gets, never interrupt it."""

    def end(number: int, frame: FrameType | None) -> None:
        worker.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(work)
        announce_ready()
        while wait([running], timeout=_LOOK_S).not_done:
            pass  # a signal that comes just before a wait does not end it; its handler runs now
        return running.result()


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Serve jobs until SIGTERM or SIGINT.")
    parser.add_argument("--job", metavar="ID", help="serve this job alone; exits 0 done, 1 failed, 3 nothing to claim")
    parser.add_argument("--token", type=int, metavar="N", help="only while its lease's token is N")
    asked = parser.parse_args()
    if asked.token is not None and asked.job is None:
        parser.error("--token needs --job")
    return asked


if __name__ == "__main__":
    main()

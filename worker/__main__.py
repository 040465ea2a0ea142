"""python -m worker: serve jobs until SIGTERM or SIGINT; polls the table, so no broker is needed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

from app.errors import Unfit
from app.ops import logs, tracing
from app.ops.supervisor import announce_ready
from app.settings import get_settings
from worker.worker import Worker

_LOOK_S = 1.0


def main() -> None:
    """Serve jobs until a signal ends the worker; exit with a message where this machine cannot serve any."""
    try:
        logs.set_up(get_settings().log_format)
        tracing.set_up("spard-worker")
        worker = Worker(get_settings())
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None
    serve(worker)


def serve(worker: Worker) -> None:
    """Run a worker in a thread of its own, so that signals, which the main thread gets, never interrupt it."""

    def end(number: int, frame: FrameType | None) -> None:
        worker.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(worker.run)
        announce_ready()
        while wait([running], timeout=_LOOK_S).not_done:
            pass  # a signal that comes just before a wait does not end it; its handler runs now
        running.result()


if __name__ == "__main__":
    main()

"""python -m worker: serve jobs until SIGTERM or SIGINT; polls the table, so no broker is needed."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

from app import logs, traces
from app.preflight import Unfit
from app.settings import get_settings
from worker.main import Worker

_LOOK_S = 1.0


def main() -> None:
    logs.set_up(get_settings().log_format)
    try:
        traces.set_up("spard-worker")
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
        while wait([running], timeout=_LOOK_S).not_done:
            pass  # a signal that comes just before a wait does not end it; its handler runs now
        running.result()


if __name__ == "__main__":
    main()

"""python -m worker: serve jobs until SIGTERM or SIGINT; polls the table, so no broker is needed."""

from __future__ import annotations

import signal
from types import FrameType

from app.settings import get_settings
from worker import logs
from worker.main import Worker


def main() -> None:
    logs.set_up()
    worker = Worker(get_settings())

    def end(number: int, frame: FrameType | None) -> None:
        worker.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    worker.run()


if __name__ == "__main__":
    main()

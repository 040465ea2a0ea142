"""Fetch the weights of fully fine-tuned models in threads of their own, one at a time for each project.

The storage may be slow or away for minutes. That must not delay requests that need no weights from it, and a project
that requests many of its models must not delay other projects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread

from app.errors import AppError
from app.inference.engine_errors import busy, engine_lost
from app.inference.engine_process import EngineProcess

log = logging.getLogger(__name__)

_AT_ONCE = 8  # fetches at the same time, each for a different project


class WeightFetches:
    """The running fetches of one process, by the digest of the weights."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[str, tuple[str, Future[EngineProcess]]] = {}

    def start(self, digest: str, project: str, work: Callable[[], EngineProcess]) -> Future[EngineProcess]:
        """Run `work`, which fetches weights and starts their engine, in a thread, and return a future of the engine.

        Calls for the same digest share one future. Raises 429 `engine_busy` if the project already fetches other
        weights, or if too many fetches run.
        """
        with self._lock:
            if digest in self._running:
                return self._running[digest][1]
            if any(each == project for each, _ in self._running.values()):
                raise busy("Another model of this project is being fetched from the storage; ask for this one later.")
            if len(self._running) >= _AT_ONCE:
                raise busy("Too many models are being fetched from the storage at the moment.")
            future: Future[EngineProcess] = Future()
            self._running[digest] = project, future
        Thread(target=self._run, args=(digest, work, future), name="weights", daemon=True).start()
        return future

    def _run(self, digest: str, work: Callable[[], EngineProcess], future: Future[EngineProcess]) -> None:
        try:
            found: EngineProcess | AppError = work()
        except AppError as error:
            found = error
        except BaseException:  # the service stops, or the disk is full; the client may try again
            log.exception("a model was not fetched")
            found = engine_lost()
        with self._lock:
            del self._running[digest]
        if isinstance(found, AppError):
            future.set_exception(found)
        else:
            future.set_result(found)

"""Check repeatedly that the models of running replies are still released, and end the replies of those that are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.errors import AppError, Unavailable
from app.inference.released import Released, check_again
from app.keys.service import Principal
from app.settings import Settings

log = logging.getLogger(__name__)

LOOK_S = 0.4  # between two checks, so that a withdrawal ends replies within a second


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    caller: Principal
    model: Released
    end: Callable[[AppError], None]


class Watch:
    """The running replies of this process; one thread checks them all."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._replies: set[_Reply] = set()
        self._lock, self._begun, self._is_closed = Lock(), Event(), False
        self._thread: Thread | None = None

    @contextmanager
    def watch_release(self, caller: Principal, model: Released, end: Callable[[AppError], None]) -> Iterator[None]:
        """While the block runs, call `end` with an error as soon as the model is not released to the caller.

        `end` is called from another thread.
        """
        reply = _Reply(caller, model, end)
        with self._lock:
            self._replies.add(reply)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="released", daemon=True)
                self._thread.start()
        self._begun.set()
        try:
            yield
        finally:
            with self._lock:
                self._replies.discard(reply)

    def close(self) -> None:
        """Stop checking."""
        self._is_closed = True
        self._begun.set()

    def _run(self) -> None:
        pause = Event()
        while not self._is_closed:
            with self._lock:
                replies = list(self._replies)
                if not replies:
                    self._begun.clear()
            if not replies:
                self._begun.wait()
                continue
            self._look(replies)
            pause.wait(LOOK_S)

    def _look(self, replies: list[_Reply]) -> None:
        """Check each pair of caller and model once, and end its replies if the check fails or the database is away."""
        by_what: dict[tuple[Principal, Released], list[_Reply]] = {}
        for reply in replies:
            by_what.setdefault((reply.caller, reply.model), []).append(reply)
        for (caller, model), same in by_what.items():
            error = self._wrong(caller, model)
            if error is not None:
                log.warning("replies of a model are ended: %s", error.code)
                for reply in same:
                    reply.end(error)

    def _wrong(self, caller: Principal, model: Released) -> AppError | None:
        try:
            with db.read(self._engine) as session:
                check_again(session, caller, model, self._settings)
        except AppError as error:
            return error
        except SQLAlchemyError:
            return Unavailable("The database does not answer, so the model's release cannot be checked; try again.")
        except Exception:  # such as a policy of a newer version; this thread is the only one, so it must go on
            log.exception("it cannot be told whether a model is released")
            return Unavailable("The model's release cannot be checked at the moment; try again.")
        return None

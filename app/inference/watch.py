"""Looks again and again whether models that answer are released still; ends the replies of those that are not."""

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

LOOK_S = 0.4  # between two looks: a change ends replies within a second


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    caller: Principal
    model: Released
    end: Callable[[AppError], None]


class Watch:
    """The replies that are being written in this process; one thread looks for all of them."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._replies: set[_Reply] = set()
        self._lock, self._begun, self._is_closed = Lock(), Event(), False
        self._thread: Thread | None = None

    @contextmanager
    def watch_release(self, caller: Principal, model: Released, end: Callable[[AppError], None]) -> Iterator[None]:
        """Call `end` with an error as soon as the model is not released to the caller any more, within the block."""
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
        """Stop looking."""
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
        """Ask once for the replies of the same caller and model; where the database does not answer, all end."""
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
            return Unavailable("The database does not answer, so that nobody knows whether this model is released.")
        except Exception:  # such as a policy of a newer version: this thread is the only one that looks
            log.exception("it cannot be told whether a model is released")
            return Unavailable("It cannot be told at the moment whether this model is released.")
        return None

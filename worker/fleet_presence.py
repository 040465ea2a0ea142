"""Record in the database that a worker is running, for the provider's view of the fleet.

Nothing depends on these rows: only leases decide which worker has a job.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from importlib.metadata import version
from threading import Event

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from app.db import transaction, why
from app.jobs import fleet
from app.jobs.fleet import Presence
from app.jobs.needs import Room
from worker import gpu

log = structlog.get_logger(__name__)


def tell(
    engine: Engine, name: str, room: Room, troubles: Callable[[], Iterable[str]], stop: Event, every_s: float
) -> None:
    """Write a worker's presence every `every_s` seconds until `stop` is set, and then that it has left."""
    host, ours, devices = socket.gethostname(), version("spard-service"), gpu.names()
    is_stopped = False
    while not is_stopped:
        is_stopped = stop.is_set()
        try:
            with transaction(engine) as session:
                if is_stopped:
                    fleet.leave(session, name)
                else:
                    has = room.memory_bytes, room.gpus
                    fleet.note(session, Presence(name, host, ours, devices, sorted(troubles()), *has))
        except SQLAlchemyError as error:
            log.warning("the worker's presence cannot be written to the database", error=why(error))
        stop.wait(every_s)

"""Unload withdrawn adapters from a vLLM server: those that a transaction has withdrawn, and those that expired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.db import Begin
from app.jobs.project_models import own_model
from app.objects import served_adapters

log = logging.getLogger(__name__)

_LOOK_S = 1.0


async def unload_withdrawn(unload: Callable[[], Awaitable[None]]) -> None:
    """Call `unload` every second until cancelled; log its errors and go on."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            await unload()
        except Exception:  # the server or the database may be away; this task is the only one, so it must go on
            log.exception("adapters of withdrawn models are not unloaded yet; trying again")


def withdrawn_digests(begin: Begin, server: str) -> list[str]:
    """Return the digests of adapters that a server holds and that are no longer released.

    Adapters whose release ended without a transaction, as an expired waiver, are marked as withdrawn here first.
    """
    with begin() as session:
        for row in served_adapters.list_adapters(session, server, is_condemned=False):
            own = own_model(session, row.project_id, row.model)
            if own is None or own.adapter is None or own.adapter["sha256"] != row.sha256:
                served_adapters.condemn_job(session, row.job_id, row.sha256)
        session.flush()
        return [row.sha256 for row in served_adapters.list_adapters(session, server, is_condemned=True)]


def drop(begin: Begin, server: str, digest: str) -> None:
    """Delete the row that says that a server holds an adapter."""
    with begin() as session:
        served_adapters.drop_row(session, server, digest)

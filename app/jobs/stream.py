"""A job as server-sent events: what happened, a heartbeat while nothing does, and how it ended.

Events are numbered within a job; a client that comes back names the last number it saw and misses nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from anyio import sleep, to_thread
from fastapi.sse import ServerSentEvent
from sqlalchemy import Engine, select

from app import db
from app.jobs import service
from app.jobs.schemas import EventOut, JobOut
from app.models import TERMINAL, JobEvent

_LOOK_S = 0.5
_HEARTBEAT_S = 15.0
_AT_ONCE = 500


async def follow(engine: Engine, tenant_id: str, job_id: str, seen: int) -> AsyncIterator[ServerSentEvent]:
    """Events after number `seen` until the job has ended; no transaction is open between two looks."""
    told = time.monotonic()
    while True:
        job, events = await to_thread.run_sync(_news, engine, tenant_id, job_id, seen)
        for event in events:
            seen, told = event.seq, time.monotonic()
            name = "metrics" if event.type == "metrics" else "event"
            yield ServerSentEvent(event=name, id=str(seen), data=EventOut.model_validate(event).model_dump(mode="json"))
        if job.status in TERMINAL and len(events) < _AT_ONCE:
            yield ServerSentEvent(event="done", data=job.model_dump(mode="json"))
            return
        if time.monotonic() - told > _HEARTBEAT_S:
            told = time.monotonic()
            yield ServerSentEvent(event="heartbeat", data={"status": job.status, "safety": job.safety})
        if not events:
            await sleep(_LOOK_S)


def _news(engine: Engine, tenant_id: str, job_id: str, seen: int) -> tuple[JobOut, Sequence[JobEvent]]:
    """How the job stands, and then what happened: an end that is seen has all its events before it."""
    with db.read(engine) as session:
        job = service.retrieve(session, tenant_id, job_id)
        later = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.seq > seen)
        return job, session.scalars(later.order_by(JobEvent.seq).limit(_AT_ONCE)).all()

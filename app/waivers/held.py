"""List the held adapters of all projects with their proposed waivers."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from app import db
from app.db.tables import HeldAdapter, Job, Waiver
from app.http.pagination import place, select_deleted_position
from app.waivers.schemas import HeldList, HeldOut, WaiverOut


def held_adapters(session: Session, after: str | None, limit: int, *, waiting: bool | None = None) -> HeldList:
    """Return a page of held adapters, newest first, from two statements.

    `waiting` True selects adapters with a waiver that waits for a second person, False all others, None all.
    """
    query = select(HeldAdapter, Job).join(Job, Job.id == HeldAdapter.job_id)
    if waiting is not None:
        is_open = Waiver.approved_at.is_(None) & (Waiver.expires_at > db.timestamp())
        proposed_for = HeldAdapter.job_id.in_(select(Waiver.job_id).where(is_open))
        query = query.where(proposed_for if waiting else ~proposed_for)
    if after is not None:
        held = select(HeldAdapter.created_at).where(HeldAdapter.job_id == after)
        at = place(session, after, held, select_deleted_position(HeldAdapter.__tablename__, after))
        tied = and_(HeldAdapter.created_at == at, HeldAdapter.job_id < after)
        query = query.where(or_(HeldAdapter.created_at < at, tied))
    order = HeldAdapter.created_at.desc(), HeldAdapter.job_id.desc()
    rows = session.execute(query.order_by(*order).limit(limit + 1)).all()
    if not rows:
        return HeldList(data=[], has_more=False)
    waivers: defaultdict[str, list[WaiverOut]] = defaultdict(list)
    now = db.clock(session)
    of_rows = Waiver.job_id.in_([job.id for _, job in rows])
    for waiver in session.scalars(select(Waiver).where(of_rows).order_by(Waiver.created_at.desc(), Waiver.id)):
        waivers[waiver.job_id].append(WaiverOut.describe(waiver, now))
    data = [_held_out_entry(held, job, waivers[job.id]) for held, job in rows[:limit]]
    return HeldList(data=data, has_more=len(rows) > limit)


def _held_out_entry(held: HeldAdapter, job: Job, waivers: list[WaiverOut]) -> HeldOut:
    gate = (job.safety or {}).get("gate")
    return HeldOut(
        job_id=job.id,
        project_id=job.project_id,
        model=job.model,
        held_at=held.created_at,
        bytes=held.bytes,
        reasons=gate.get("reasons", []) if gate else [],
        waivers=waivers,
    )

"""Propose, approve and end waivers: an adapter that failed is released only after two people have agreed.

The release comes with a signed record.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import ApiKey, HeldAdapter, Job, JobStatus, Waiver
from app.db.tables.job_records import KeyName, WaiverFacts
from app.errors import Forbidden, HasNone, InvalidRequest, InvalidState, NotFound
from app.http.pagination import place, select_deleted_position
from app.http.schemas import Body, UnixTime
from app.jobs import events, transitions
from app.jobs.project_models import fine_tuned_model
from app.keys import Principal
from app.objects import served_adapters
from app.settings import Settings
from app.signing import signing_key
from spard.release.manifest import sign_bytes

LONGEST = timedelta(days=366)
_FAILED, _WAIVED = "safety_gate_failed", "waived"


class WaiverCreate(Body):
    """Why an adapter that failed should be released, and until when."""

    reason: Annotated[str, Field(min_length=10, max_length=1000)]
    expires_at: Annotated[int, Field(ge=0, le=2**37, description="Unix seconds, at most 366 days from now.")]


class WaiverOut(BaseModel):
    """One waiver; `proposed_by` and `approved_by` are ids of keys."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.waiver"] = "safety.waiver"
    id: str
    job_id: str
    reason: str
    created_at: UnixTime
    expires_at: UnixTime
    proposed_by: str
    approved_by: str | None
    approved_at: UnixTime | None
    record: str | None
    signature: dict[str, str] | None

    status: Literal["proposed", "approved", "expired"] = Field(
        description="Whether it releases the adapter now: only an approved one does, until it expires."
    )

    @classmethod
    def describe(cls, waiver: Waiver, now: datetime) -> Self:
        """Return a waiver with its status at `now`, a time of the database's clock."""
        unexpired = "approved" if waiver.approved_by else "proposed"
        fields = {name: getattr(waiver, name) for name in cls.model_fields if name not in ("object", "status")}
        return cls.model_validate(fields | {"status": "expired" if waiver.expires_at <= now else unexpired})


class WaiverList(BaseModel):
    """All waivers of a job, newest first."""

    object: Literal["list"] = "list"
    data: list[WaiverOut]


class HeldOut(BaseModel):
    """An adapter that the gate held back and that is kept for a waiver; `reasons` are the gate's."""

    object: Literal["safety.held_adapter"] = "safety.held_adapter"
    job_id: str
    project_id: str
    model: str
    held_at: UnixTime
    bytes: int
    reasons: list[str]
    waivers: list[WaiverOut]

    @property
    def state(self) -> Literal["held", "proposed", "released"]:
        """`released` if a waiver is in force, `proposed` if one waits for approval, else `held`."""
        found = {each.status for each in self.waivers}
        return "released" if "approved" in found else "proposed" if "proposed" in found else "held"


class HeldList(BaseModel):
    """One page of held adapters, newest first; for the next page set `after` to the last one's `job_id`."""

    object: Literal["list"] = "list"
    data: list[HeldOut]
    has_more: bool


class SignedWaiver(BaseModel):
    """The input of `spard verify --waiver`: `signature` signs the bytes of `record`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.signed_waiver"] = "safety.signed_waiver"
    record: str
    signature: dict[str, str]


def propose(session: Session, caller: Principal, job_id: str, ask: WaiverCreate) -> Waiver:
    """Propose a waiver with a reason and an expiry; a second person has to approve it.

    Raises `InvalidState` if the job has no held adapter, and `InvalidRequest` for an expiry that is past or too far.
    """
    _waivable(session, job_id)
    now, expires_at = db.clock(session), datetime.fromtimestamp(ask.expires_at, UTC)
    if not now < expires_at <= now + LONGEST:
        message = f"expires_at must lie in the future, at most {LONGEST.days} days from now."
        raise InvalidRequest(message, code="out_of_range", param="expires_at")
    waiver = Waiver(job_id=job_id, reason=ask.reason, expires_at=expires_at, proposed_by=caller.key_id)
    session.add(waiver)
    session.flush()
    audit_log.record(session, "waiver.proposed", waiver.id, job=job_id, reason=ask.reason)
    return waiver


def approve(session: Session, caller: Principal, job_id: str, waiver_id: str, settings: Settings) -> Waiver:
    """Approve a waiver with another person's key: the adapter is released until the waiver expires.

    The signed record of the release is stored with the waiver. Raises `Forbidden` unless two different owners hold the
    two keys, and `InvalidState` for a waiver that was approved before, has expired or was proposed with a revoked key.
    """
    job, held = _waivable(session, job_id)
    waiver = _waiver(session, job_id, waiver_id)
    _check(session, waiver, caller)
    waiver.approved_by, waiver.approved_at = caller.key_id, db.clock(session)
    facts = _facts(session, waiver, job, held)
    waiver.record = json.dumps(facts, indent=2, sort_keys=True)
    waiver.signature = dict(sign_bytes(waiver.record.encode(), signing_key(settings)))
    session.flush()  # a database trigger allows the change of an ended job only after this row
    _release(session, job, held, facts)
    audit_log.record(
        session,
        "waiver.approved",
        waiver.id,
        job=job_id,
        reason=waiver.reason,
        proposed_by=facts["proposed_by"],
        approved_by=facts["approved_by"],
    )
    return waiver


def end(session: Session, job_id: str, waiver_id: str) -> Waiver:
    """End a waiver or withdraw a proposed one; one person is enough to hold an adapter back.

    Downloaded copies are not affected, and their signed record keeps the original expiry.
    """
    job, _ = _waivable(session, job_id)
    waiver = _waiver(session, job_id, waiver_id)
    now = db.clock(session)
    if waiver.expires_at <= now:
        raise InvalidState(f"{waiver.id} has ended already.", code="waiver_expired")
    waiver.expires_at = now
    session.flush()
    in_force = job.safety.get("waiver") if job.safety else None
    if job.safety and in_force and in_force["waiver_id"] == waiver.id:
        ended: WaiverFacts = {**in_force, "expires_at": int(waiver.expires_at.timestamp())}
        # The job stays succeeded, but downloads check the expiry of the waiver that it shows.
        shown = {**job.safety, "waiver": ended}
        transitions.change_status(session, Job.id == job.id, job.status, JobStatus.succeeded, safety=shown)
        events.append(session, job.id, "warn", "message", "The waiver that released the adapter was ended")
    served_adapters.condemn_job(session, job_id)
    audit_log.record(session, "waiver.ended", waiver.id, job=job_id)
    return waiver


def waivers(session: Session, job_id: str) -> Sequence[Waiver]:
    """Return the waivers that were proposed for a job, newest first."""
    if session.get(Job, job_id) is None:
        raise _unknown(job_id)
    return session.scalars(
        select(Waiver).where(Waiver.job_id == job_id).order_by(Waiver.created_at.desc(), Waiver.id)
    ).all()


def find_releasing_waiver(session: Session, job: Job) -> Waiver:
    """Return the waiver that was approved last for the job; raise `HasNone` if there is none."""
    by_job = (Waiver.job_id == job.id) & Waiver.approved_at.is_not(None)
    waiver = session.scalar(select(Waiver).where(by_job).order_by(Waiver.approved_at.desc()).limit(1))
    if waiver is None:
        message = f"Job {job.id} was not released by a waiver."
        raise HasNone(message, code="waiver_not_found", param="fine_tuning_job_id")
    return waiver


def _waiver(session: Session, job_id: str, waiver_id: str) -> Waiver:
    waiver = session.scalar(select(Waiver).where(Waiver.id == waiver_id, Waiver.job_id == job_id))
    if waiver is None:
        raise NotFound(f"No such waiver: {waiver_id}", code="waiver_not_found", param="waiver_id")
    return waiver


def _waivable(session: Session, job_id: str) -> tuple[Job, HeldAdapter]:
    """Return a job, locked, and its held adapter.

    Raises `InvalidState` if the job did not fail the gate or its adapter was not kept.
    """
    job = transitions.lock_jobs(session, Job.id == job_id).one_or_none()
    if job is None:
        raise _unknown(job_id)
    failed = job.error is not None and job.error["code"] == _FAILED
    if not failed and (job.safety is None or "waiver" not in job.safety):
        raise InvalidState(f"Job {job.id} is {job.status} and did not fail the safety gate; there is nothing to waive.")
    held = session.get(HeldAdapter, job_id)
    if held is None:
        message = f"The adapter of {job.id} was not kept: the policy that it was created under allows no waivers."
        raise InvalidState(message, code="adapter_not_kept")
    return job, held


def _check(session: Session, waiver: Waiver, caller: Principal) -> None:
    if waiver.approved_by is not None:
        raise InvalidState(f"{waiver.id} was approved before.")
    if waiver.expires_at <= db.clock(session):
        raise InvalidState(f"{waiver.id} has expired; propose a new one.", code="waiver_expired")
    proposer, approver = (session.get_one(ApiKey, key_id) for key_id in (waiver.proposed_by, caller.key_id))
    _check_persons(proposer, approver)
    # A revoked key no longer speaks for its owner.
    if proposer.revoked_at is not None:
        raise InvalidState(f"The key that proposed {waiver.id} was revoked; propose a new one.", code="key_revoked")


def _check_persons(proposer: ApiKey, approver: ApiKey) -> None:
    """Raise Forbidden unless two different people hold the two keys."""
    if proposer.id == approver.id:
        raise Forbidden("A waiver is approved by another key than the one that proposed it.", code="same_person")
    if proposer.owner is None or approver.owner is None:
        message = "Propose and approve with keys that have an owner, so that two people are known."
        raise Forbidden(message, code="owner_unknown")
    if proposer.owner.casefold() == approver.owner.casefold():
        raise Forbidden(f"{proposer.owner} proposed it; another person approves it.", code="same_person")


def _facts(session: Session, waiver: Waiver, job: Job, held: HeldAdapter) -> WaiverFacts:
    """Return the record to sign."""
    return {
        "waiver_id": waiver.id,
        "job_id": job.id,
        "manifest_sha256": held.manifest_sha256,
        "archive_sha256": held.sha256,
        "decision": _WAIVED,
        "reason": waiver.reason,
        "proposed_by": _name(session, waiver.proposed_by),
        "approved_by": _name(session, waiver.approved_by or ""),
        "proposed_at": int(waiver.created_at.timestamp()),
        "approved_at": int(waiver.approved_at.timestamp()) if waiver.approved_at else None,
        "expires_at": int(waiver.expires_at.timestamp()),
    }


def _name(session: Session, key_id: str) -> KeyName:
    key = session.get_one(ApiKey, key_id)
    return {"key_id": key_id, "name": key.name, "owner": key.owner}


def _release(session: Session, job: Job, held: HeldAdapter, facts: WaiverFacts) -> None:
    """Release the adapter of a locked job that the gate held back."""
    if job.safety is None:
        raise InvalidState(f"Job {job.id} was not measured.")
    transitions.change_status(
        session,
        Job.id == job.id,
        job.status,
        JobStatus.succeeded,
        safety={**job.safety, "gate": {**job.safety["gate"], "decision": _WAIVED}, "waiver": facts},
        adapter={"storage_key": held.storage_key, "sha256": held.sha256, "bytes": held.bytes},
        error=None,
        fine_tuned_model=fine_tuned_model(job),
    )
    message = f"The adapter is released by a waiver until {datetime.fromtimestamp(facts['expires_at'], UTC):%Y-%m-%d}"
    events.append(session, job.id, "warn", "message", message, {"reason": facts["reason"]})
    session.flush()


def _unknown(job_id: str) -> NotFound:
    return NotFound(f"Could not find fine tune: {job_id}", code="fine_tune_not_found", param="fine_tuning_job_id")


# List the held adapters of all projects with their proposed waivers.


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

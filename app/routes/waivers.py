"""Waivers: proposed and approved by keys with the admin scope, verified by the adapter's recipients."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app import db
from app.db.tables import Waiver
from app.deps import AdminDep, AfterQuery, CustomerDep, ProviderSessionDep, ReadDep, SettingsDep
from app.jobs import service as jobs
from app.waivers import service
from app.waivers.schemas import HeldList, SignedWaiver, WaiverCreate, WaiverList, WaiverOut
from app.waivers.service import held_adapters

held = APIRouter(prefix="/v1/admin/held_adapters", tags=["provider"])
admin = APIRouter(prefix="/v1/admin/jobs/{job_id}/waivers", tags=["provider"])
of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


@held.get("", response_model=HeldList)
def list_held_adapters(
    session: ReadDep,
    caller: AdminDep,
    waiting: bool | None = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> HeldList:
    """List the adapters of all projects that the gate held back, newest first, with their waivers.

    `waiting=true` selects adapters with a waiver that waits for a second person, `waiting=false` all others.
    """
    return held_adapters(session, after, limit, waiting=waiting)


@admin.get("", response_model=WaiverList)
def list_waivers(job_id: str, session: ReadDep, caller: AdminDep) -> WaiverList:
    """List the waivers that were proposed for a job, newest first."""
    now = db.clock(session)
    return WaiverList(data=[WaiverOut.describe(each, now) for each in service.waivers(session, job_id)])


@admin.post("", response_model=WaiverOut)
def propose_waiver(job_id: str, ask: WaiverCreate, session: ProviderSessionDep, caller: AdminDep) -> WaiverOut:
    """Propose to release an adapter that failed the safety gate; nothing is released yet."""
    return WaiverOut.describe(service.propose(session, caller, job_id, ask), db.clock(session))


@admin.post("/{waiver_id}/approve", response_model=WaiverOut)
def approve_waiver(
    job_id: str, waiver_id: str, session: ProviderSessionDep, caller: AdminDep, settings: SettingsDep
) -> WaiverOut:
    """Approve a waiver that another admin key proposed: the adapter is released until the waiver expires."""
    return WaiverOut.describe(service.approve(session, caller, job_id, waiver_id, settings), db.clock(session))


@admin.post("/{waiver_id}/end", response_model=WaiverOut)
def end_waiver(job_id: str, waiver_id: str, session: ProviderSessionDep, caller: AdminDep) -> WaiverOut:
    """End a waiver early: the adapter is held back again from now on."""
    return WaiverOut.describe(service.end(session, job_id, waiver_id), db.clock(session))


@of_jobs.get("/{job_id}/waiver", response_model=SignedWaiver)
def retrieve_waiver(job_id: str, session: ReadDep, caller: CustomerDep) -> Waiver:
    """Return the signed record of the waiver that released the adapter; keep it beside the adapter."""
    return service.find_releasing_waiver(session, jobs.get(session, caller.project_id, job_id))

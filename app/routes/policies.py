"""Policies for customers' jobs, and waivers of what a policy's gate held back, for keys with the admin scope.

Recipients of an adapter verify the waiver that released it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app import db, waivers
from app.db.tables import Waiver
from app.deps import (
    AdminDep,
    AfterQuery,
    CustomerDep,
    LookDep,
    ProviderSessionDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
)
from app.jobs import policy_trial
from app.jobs import service as jobs
from app.jobs.policy_trial import PolicyTrial
from app.policies import service
from app.policies.schemas import PolicyList
from app.policies.service import PolicyAdded, PolicyChange
from app.waivers import HeldList, SignedWaiver, WaiverCreate, WaiverList, WaiverOut, held_adapters

router = APIRouter(prefix="/v1/admin/policies", tags=["provider"])
ReplaceQuery = Annotated[
    bool,
    Query(description="Reset fields that the body does not name to their defaults, instead of keeping their values."),
]
held = APIRouter(prefix="/v1/admin/held_adapters", tags=["provider"])
waivers_of_job = APIRouter(prefix="/v1/admin/jobs/{job_id}/waivers", tags=["provider"])
waivers_of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


@router.get("", response_model=PolicyList)
def list_policies(session: ReadDep, caller: AdminDep, settings: SettingsDep) -> PolicyList:
    """List every version, newest first; the first one is in force."""
    return PolicyList(data=service.versions(session, settings))


@router.post("", response_model=PolicyAdded)
def add_policy(
    change: PolicyChange,
    session: ProviderSessionDep,
    caller: AdminDep,
    settings: SettingsDep,
    replace: ReplaceQuery = False,
) -> PolicyAdded:
    """Put a new version in force: the current one with the body's changes; existing jobs keep their version."""
    return service.put_in_force(session, settings, caller.key_id, change, replace)


@router.post("/dry_run", response_model=PolicyTrial)
async def try_policy(
    change: PolicyChange,
    look: LookDep,
    caller: AdminDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
    settings: SettingsDep,
    limit: Annotated[int, Query(ge=1, le=policy_trial.MOST)] = policy_trial.USUAL,
    replace: ReplaceQuery = False,
) -> Response:
    """Return what a policy changes for the latest jobs of all projects; nothing is stored or run again."""

    def trial() -> PolicyTrial:
        with look() as session:
            policy = service.requested_policy(session, settings, change, replace)
        return policy_trial.try_policy(look, storage, policy, limit)

    return await reads.answer(trial)


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


@waivers_of_job.get("", response_model=WaiverList)
def list_waivers(job_id: str, session: ReadDep, caller: AdminDep) -> WaiverList:
    """List the waivers that were proposed for a job, newest first."""
    now = db.clock(session)
    return WaiverList(data=[WaiverOut.describe(each, now) for each in waivers.waivers(session, job_id)])


@waivers_of_job.post("", response_model=WaiverOut)
def propose_waiver(job_id: str, ask: WaiverCreate, session: ProviderSessionDep, caller: AdminDep) -> WaiverOut:
    """Propose to release an adapter that failed the safety gate; nothing is released yet."""
    return WaiverOut.describe(waivers.propose(session, caller, job_id, ask), db.clock(session))


@waivers_of_job.post("/{waiver_id}/approve", response_model=WaiverOut)
def approve_waiver(
    job_id: str, waiver_id: str, session: ProviderSessionDep, caller: AdminDep, settings: SettingsDep
) -> WaiverOut:
    """Approve a waiver that another admin key proposed: the adapter is released until the waiver expires."""
    return WaiverOut.describe(waivers.approve(session, caller, job_id, waiver_id, settings), db.clock(session))


@waivers_of_job.post("/{waiver_id}/end", response_model=WaiverOut)
def end_waiver(job_id: str, waiver_id: str, session: ProviderSessionDep, caller: AdminDep) -> WaiverOut:
    """End a waiver early: the adapter is held back again from now on."""
    return WaiverOut.describe(waivers.end(session, job_id, waiver_id), db.clock(session))


@waivers_of_jobs.get("/{job_id}/waiver", response_model=SignedWaiver)
def retrieve_waiver(job_id: str, session: ReadDep, caller: CustomerDep) -> Waiver:
    """Return the signed record of the waiver that released the adapter; keep it beside the adapter."""
    return waivers.find_releasing_waiver(session, jobs.get(session, caller.project_id, job_id))

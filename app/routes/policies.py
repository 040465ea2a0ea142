"""/v1/admin/policies: what customers may ask for, for keys with the admin scope."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.deps import AdminDep, LookDep, ProviderSessionDep, QuickStorageDep, ReadDep, ReadsDep, SettingsDep
from app.jobs.trials import policy_trial
from app.jobs.trials.schemas import PolicyTrial
from app.policies import service
from app.policies.schemas import Policy, PolicyList, PolicyOut

router = APIRouter(prefix="/v1/admin/policies", tags=["provider"])


@router.get("", response_model=PolicyList)
def list_policies(session: ReadDep, caller: AdminDep, settings: SettingsDep) -> PolicyList:
    """List every version, newest first; the first one is in force."""
    return PolicyList(data=service.versions(session, settings))


@router.post("", response_model=PolicyOut)
def add_policy(policy: Policy, session: ProviderSessionDep, caller: AdminDep, settings: SettingsDep) -> PolicyOut:
    """Put a new version in force. Earlier ones stay, and jobs keep the one that they were created under."""
    return service.add(session, caller.key_id, policy.completed(settings.gate))


@router.post("/dry_run", response_model=PolicyTrial)
async def try_policy(
    policy: Policy,
    look: LookDep,
    caller: AdminDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
    settings: SettingsDep,
    limit: Annotated[int, Query(ge=1, le=policy_trial.MOST)] = policy_trial.USUAL,
) -> Response:
    """Say what a policy would have changed for the latest jobs of all projects; nothing is stored or run again."""
    return await reads.answer(partial(policy_trial.try_out, look, storage, policy.completed(settings.gate), limit))

"""/v1/admin/policies: the policies for customers' jobs, for keys with the admin scope."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.deps import AdminDep, LookDep, ProviderSessionDep, QuickStorageDep, ReadDep, ReadsDep, SettingsDep
from app.jobs import policy_trial
from app.jobs.policy_trial import PolicyTrial
from app.policies import service
from app.policies.schemas import PolicyList
from app.policies.service import PolicyAdded, PolicyChange

router = APIRouter(prefix="/v1/admin/policies", tags=["provider"])
ReplaceQuery = Annotated[
    bool,
    Query(description="Reset fields that the body does not name to their defaults, instead of keeping their values."),
]


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

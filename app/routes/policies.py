"""/v1/admin/policies: what customers may ask for, for keys with the admin scope."""

from __future__ import annotations

from fastapi import APIRouter

from app.deps import AdminDep, ProviderSessionDep, ReadDep, SettingsDep
from app.policies import service
from app.policies.schemas import Policy, PolicyList, PolicyOut

router = APIRouter(prefix="/v1/admin/policies", tags=["provider"])


@router.get("", response_model=PolicyList)
def list_policies(session: ReadDep, caller: AdminDep, settings: SettingsDep) -> PolicyList:
    """Every version, newest first; the first one is in force."""
    return PolicyList(data=service.versions(session, settings))


@router.post("", response_model=PolicyOut)
def add_policy(policy: Policy, session: ProviderSessionDep, caller: AdminDep) -> PolicyOut:
    """Put a new version in force. Earlier ones stay, and jobs keep the one that they were created under."""
    return service.add(session, caller.key_id, policy)

"""Projects, for the provider: their limits and usage, their API keys, and texts that are stored under a policy.

Also the audit log, for keys with the scope `admin`: what the provider and others did in all projects.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app import audit_log, quotas
from app import keys as api_keys
from app.audit_log import EntryList, VerificationOut
from app.db.tables import ApiKey, StoredReply
from app.deps import AdminDep, LookDep, ProviderSessionDep, ReadDep, ReadsDep
from app.http.pagination import Page
from app.inference import calls
from app.inference.calls import StoredRepliesDeleted, StoredReplyList
from app.keys import KeyCreate, KeyList, KeyOut, KeySecret
from app.quotas import ProjectCreate, ProjectList, ProjectOut, QuotaSet, UsageList

projects = APIRouter(prefix="/v1/admin", tags=["provider"])
Unix = Annotated[int, Query(ge=0, le=253_402_300_799)]  # until the year 9999
keys = APIRouter(prefix="/v1/admin/keys", tags=["provider"])
log = APIRouter(prefix="/v1/admin/audit_log", tags=["provider"])
stored_replies = APIRouter(prefix="/v1/admin/projects/{project_id}/stored_replies", tags=["provider"])
Limit = Annotated[int, Query(ge=1, le=100)]


@projects.get("/projects", response_model=ProjectList)
def list_projects(session: ReadDep, caller: AdminDep) -> ProjectList:
    """List all projects with their limits."""
    return ProjectList(data=quotas.projects(session))


@projects.post("/projects", response_model=ProjectOut)
def create_project(ask: ProjectCreate, session: ProviderSessionDep, caller: AdminDep) -> ProjectOut:
    """Create a project, without limits and without a key."""
    return quotas.create_project(session, ask.name)


@projects.get("/projects/{project_id}", response_model=ProjectOut)
def retrieve_project(project_id: str, session: ReadDep, caller: AdminDep) -> ProjectOut:
    """Return one project with its limits."""
    return quotas.project(session, project_id)


@projects.post("/projects/{project_id}/quota", response_model=ProjectOut)
def set_quota(project_id: str, ask: QuotaSet, session: ProviderSessionDep, caller: AdminDep) -> ProjectOut:
    """Set a project's limits; they replace all previous ones."""
    return quotas.set_quota(session, project_id, ask)


@projects.get("/usage", response_model=UsageList)
def list_usage(session: ReadDep, caller: AdminDep, start_time: Unix = 0, end_time: Unix = 253_402_300_799) -> UsageList:
    """List each project's usage by jobs created in a period, erased ones included, and its current storage."""
    since, until = (datetime.fromtimestamp(at, UTC) for at in (start_time, end_time))
    return UsageList(data=quotas.usage(session, since, until))


@keys.get("", response_model=KeyList)
def list_keys(
    session: ReadDep,
    caller: AdminDep,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
) -> dict[str, object]:
    """List the keys of a project, or of all projects; including revoked ones."""
    return {"data": api_keys.list_keys(session, project_id)}


@keys.post("", response_model=KeySecret)
def create_key(ask: KeyCreate, session: ProviderSessionDep, caller: AdminDep) -> dict[str, object]:
    """Create a key; its secret is shown only in this answer."""
    key, secret = api_keys.issue_key(session, caller, ask)
    return {"key": key, "secret": secret}


@keys.post("/{key_id}/rotate", response_model=KeySecret)
def rotate_key(
    key_id: str,
    session: ProviderSessionDep,
    caller: AdminDep,
    overlap_s: Annotated[int, Query(ge=0, le=2_592_000)] = 86_400,
) -> dict[str, object]:
    """Create a key to replace an old one, which stays valid for `overlap_s` more seconds."""
    key, secret = api_keys.rotate_key(session, caller, key_id, timedelta(seconds=overlap_s))
    return {"key": key, "secret": secret}


@keys.delete("/{key_id}", response_model=KeyOut)
def revoke_key(key_id: str, session: ProviderSessionDep, caller: AdminDep) -> ApiKey:
    """Revoke a key at once."""
    return api_keys.revoke_key(session, key_id)


@stored_replies.get("", response_model=StoredReplyList)
def list_stored_replies(
    project_id: str, session: ProviderSessionDep, caller: AdminDep, after: str | None = None, limit: Limit = 20
) -> Page[StoredReply]:
    """List the stored prompts and replies of a project, newest first; the audit log records the access."""
    return calls.list_replies(session, project_id, after, limit)


@stored_replies.delete("", response_model=StoredRepliesDeleted)
def erase_stored_replies(project_id: str, session: ProviderSessionDep, caller: AdminDep) -> StoredRepliesDeleted:
    """Erase all stored prompts and replies of a project."""
    return StoredRepliesDeleted(project_id=project_id, deleted=calls.erase_replies(session, project_id))


@log.get("", response_model=EntryList)
def list_entries(
    session: ReadDep,
    caller: AdminDep,
    action: Annotated[str | None, Query(pattern=r"^[a-z_]+\.[a-z_]+$", max_length=64)] = None,
    after: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> audit_log.Entries:
    """List who did what to what, newest first."""
    return audit_log.entries(session, action, after, limit)


@log.get("/verification", response_model=VerificationOut)
async def verify_log(caller: AdminDep, look: LookDep, reads: ReadsDep) -> Response:
    """Recompute every hash of the log, as `spard audit-log verify` does."""
    return await reads.answer(partial(audit_log.verification, look))

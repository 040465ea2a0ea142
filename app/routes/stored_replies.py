"""Prompts and replies stored under a policy: read and erased by keys with the admin scope."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.db.tables import StoredReply
from app.deps import AdminDep, ProviderSessionDep
from app.http.pagination import Page
from app.inference import stored
from app.inference.stored import StoredRepliesDeleted, StoredReplyList

router = APIRouter(prefix="/v1/admin/projects/{project_id}/stored_replies", tags=["provider"])

Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("", response_model=StoredReplyList)
def list_stored_replies(
    project_id: str, session: ProviderSessionDep, caller: AdminDep, after: str | None = None, limit: Limit = 20
) -> Page[StoredReply]:
    """List the stored prompts and replies of a project, newest first; the audit log records the access."""
    return stored.list_replies(session, project_id, after, limit)


@router.delete("", response_model=StoredRepliesDeleted)
def erase_stored_replies(project_id: str, session: ProviderSessionDep, caller: AdminDep) -> StoredRepliesDeleted:
    """Erase all stored prompts and replies of a project."""
    return StoredRepliesDeleted(project_id=project_id, deleted=stored.erase(session, project_id))

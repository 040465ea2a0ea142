"""API keys, for the provider: create, rotate, revoke."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from app.db.tables import ApiKey
from app.deps import AdminDep, ProviderSessionDep, ReadDep
from app.keys import admin
from app.keys.schemas import KeyCreate, KeyList, KeyOut, KeySecret

router = APIRouter(prefix="/v1/admin/keys", tags=["provider"])


@router.get("", response_model=KeyList)
def list_keys(
    session: ReadDep,
    caller: AdminDep,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
) -> dict[str, object]:
    """List the keys of a project, or of all projects; including revoked ones."""
    return {"data": admin.list_keys(session, project_id)}


@router.post("", response_model=KeySecret)
def create_key(ask: KeyCreate, session: ProviderSessionDep, caller: AdminDep) -> dict[str, object]:
    """Create a key; its secret is shown only in this answer."""
    key, secret = admin.create(session, caller, ask)
    return {"key": key, "secret": secret}


@router.post("/{key_id}/rotate", response_model=KeySecret)
def rotate_key(
    key_id: str,
    session: ProviderSessionDep,
    caller: AdminDep,
    overlap_s: Annotated[int, Query(ge=0, le=2_592_000)] = 86_400,
) -> dict[str, object]:
    """Create a key to replace an old one, which stays valid for `overlap_s` more seconds."""
    key, secret = admin.rotate(session, caller, key_id, timedelta(seconds=overlap_s))
    return {"key": key, "secret": secret}


@router.delete("/{key_id}", response_model=KeyOut)
def revoke_key(key_id: str, session: ProviderSessionDep, caller: AdminDep) -> ApiKey:
    """Revoke a key at once."""
    return admin.revoke(session, key_id)

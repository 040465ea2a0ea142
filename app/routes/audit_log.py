"""GET /v1/admin/audit_log: the audit log, for keys with the admin scope."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app import audit_log
from app.audit_log import EntryList, VerificationOut
from app.deps import AdminDep, LookDep, ReadDep, ReadsDep

router = APIRouter(prefix="/v1/admin/audit_log", tags=["provider"])


@router.get("", response_model=EntryList)
def list_entries(
    session: ReadDep,
    caller: AdminDep,
    action: Annotated[str | None, Query(pattern=r"^[a-z_]+\.[a-z_]+$", max_length=64)] = None,
    after: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> audit_log.Entries:
    """List who did what to what, newest first."""
    return audit_log.entries(session, action, after, limit)


@router.get("/verification", response_model=VerificationOut)
async def verify_log(caller: AdminDep, look: LookDep, reads: ReadsDep) -> Response:
    """Recompute every hash of the log, as `spard audit-log verify` does."""
    return await reads.answer(partial(audit_log.verification, look))

"""Request and response schemas of later audits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.http.schemas import Body, UnixTime


class LaterAuditCreate(Body):
    """Which model of the job to audit again."""

    step: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Step of a checkpoint; 0: the job's own model."
    )


class LaterAuditOut(BaseModel):
    """One later audit; `decision` is null until the audit has ended. `signature` signs the bytes of `record`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.later_audit"] = "safety.later_audit"
    id: str
    job_id: str
    step: int
    audit_version: int
    created_at: UnixTime
    decided_at: UnixTime | None
    decision: str | None
    reasons: list[str] | None
    record: str | None
    signature: dict[str, str] | None


class LaterAuditOfProvider(LaterAuditOut):
    """A later audit as the provider sees it, with the job that runs it; null if it could not be run."""

    audit_job_id: str | None


class LaterAuditList(BaseModel):
    """All later audits of a job and its checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[LaterAuditOut]

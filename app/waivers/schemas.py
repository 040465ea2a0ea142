"""Schemas of waivers and held adapters."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from app.db.tables import Waiver
from app.http.schemas import Body, UnixTime

LONGEST = timedelta(days=366)


class WaiverCreate(Body):
    """Why an adapter that failed should be released, and until when."""

    reason: Annotated[str, Field(min_length=10, max_length=1000)]
    expires_at: Annotated[int, Field(ge=0, le=2**37, description="Unix seconds, at most 366 days from now.")]


class WaiverOut(BaseModel):
    """One waiver; `proposed_by` and `approved_by` are ids of keys."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.waiver"] = "safety.waiver"
    id: str
    job_id: str
    reason: str
    created_at: UnixTime
    expires_at: UnixTime
    proposed_by: str
    approved_by: str | None
    approved_at: UnixTime | None
    record: str | None
    signature: dict[str, str] | None

    status: Literal["proposed", "approved", "expired"] = Field(
        description="Whether it releases the adapter now: only an approved one does, until it expires."
    )

    @classmethod
    def describe(cls, waiver: Waiver, now: datetime) -> Self:
        """Return a waiver with its status at `now`, a time of the database's clock."""
        unexpired = "approved" if waiver.approved_by else "proposed"
        fields = {name: getattr(waiver, name) for name in cls.model_fields if name not in ("object", "status")}
        return cls.model_validate(fields | {"status": "expired" if waiver.expires_at <= now else unexpired})


class WaiverList(BaseModel):
    """All waivers of a job, newest first."""

    object: Literal["list"] = "list"
    data: list[WaiverOut]


class HeldOut(BaseModel):
    """An adapter that the gate held back and that is kept for a waiver; `reasons` are the gate's."""

    object: Literal["safety.held_adapter"] = "safety.held_adapter"
    job_id: str
    project_id: str
    model: str
    held_at: UnixTime
    bytes: int
    reasons: list[str]
    waivers: list[WaiverOut]

    @property
    def state(self) -> Literal["held", "proposed", "released"]:
        """`released` if a waiver is in force, `proposed` if one waits for approval, else `held`."""
        found = {each.status for each in self.waivers}
        return "released" if "approved" in found else "proposed" if "proposed" in found else "held"


class HeldList(BaseModel):
    """One page of held adapters, newest first; for the next page set `after` to the last one's `job_id`."""

    object: Literal["list"] = "list"
    data: list[HeldOut]
    has_more: bool


class SignedWaiver(BaseModel):
    """The input of `spard verify --waiver`: `signature` signs the bytes of `record`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.signed_waiver"] = "safety.signed_waiver"
    record: str
    signature: dict[str, str]

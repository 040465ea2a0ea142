"""Schemas of the audit log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from app.http.schemas import UnixTime


class EntryOut(BaseModel):
    """One action; `hash` chains it to the previous entry."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["audit_log.entry"] = "audit_log.entry"
    seq: int
    created_at: UnixTime
    actor: str
    tenant_id: str | None
    action: str
    target: str
    result: str
    request_id: str | None
    details: dict[str, JsonValue] | None
    hash: str

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own form
    @property
    def id(self) -> str:
        """The cursor of the next page."""
        return str(self.seq)


class EntryList(BaseModel):
    """One page of the audit log, newest first; for the next page set `after` to the last entry's `id`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[EntryOut]
    has_more: bool


class BrokenOut(BaseModel):
    """The first row that was changed or is missing."""

    model_config = ConfigDict(from_attributes=True)

    seq: int
    why: str


class VerificationOut(BaseModel):
    """The result of verifying the chain: the number of rows and the last hash, or the first broken row.

    Store `rows` and `head` elsewhere: a chain whose last rows were cut off is still intact.
    """

    object: Literal["audit_log.verification"] = "audit_log.verification"
    is_intact: bool
    rows: int | None = None
    head: str | None = None
    broken: BrokenOut | None = None

"""The audit log as the provider sees it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from app.http.schemas import UnixTime


class EntryOut(BaseModel):
    """One act; `hash` chains it to the one with the number before."""

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
    """One page of the audit log, the latest first; for the next page set `after` to the last entry's `id`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[EntryOut]
    has_more: bool


class BrokenOut(BaseModel):
    """The first row that is not as it was written."""

    model_config = ConfigDict(from_attributes=True)

    seq: int
    why: str


class VerificationOut(BaseModel):
    """Whether every row follows from the one before: how many there are and the hash of the last, or the first bad one.

    Note `rows` and `head` elsewhere: rows that are cut off at the end leave a chain that is whole.
    """

    object: Literal["audit_log.verification"] = "audit_log.verification"
    is_intact: bool
    rows: int | None = None
    head: str | None = None
    broken: BrokenOut | None = None

"""Schemas of OpenAI's upload objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.files.schemas import FileOut
from app.http.schemas import Body, UnixTime
from spard.data import strict_json


class ExpiresAfter(Body):
    """When the finished file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class UploadCreate(Body):
    """A file to upload in parts that have exactly `bytes` bytes in total."""

    filename: Annotated[str, Field(max_length=255)]
    purpose: Annotated[str, Field(max_length=64)]
    bytes: Annotated[int, Field(ge=1, le=2**53)]
    mime_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}/[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$")]
    expires_after: ExpiresAfter | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_plain_text(cls, body: Any) -> Any:
        strict_json.check(body)
        return body


class UploadComplete(Body):
    """The parts of the file in order; `md5` is the MD5 of the whole file."""

    part_ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=10_000)]
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


class PartOut(BaseModel):
    """A part that is in storage."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: UnixTime
    upload_id: str


class UploadOut(BaseModel):
    """An upload; `file` is present once it is completed."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["upload"] = "upload"
    created_at: UnixTime
    expires_at: UnixTime
    filename: str
    bytes: int
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileOut | None = None

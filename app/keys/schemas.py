"""Schemas of keys; the secret is shown only once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.http.schemas import Body, UnixTime

Scope = Literal["customer", "read", "admin"]
_YEARS_S = 10 * 366 * 86_400


def _customer() -> list[Scope]:
    return ["customer"]


class KeyCreate(Body):
    """A key of a project; without `expires_in_s` it is valid until it is revoked.

    The scope `read` allows a customer's GET requests only. `owner` is the person who will hold the key: a name or a
    mail address.
    """

    project_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,64}$")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=3)] = Field(default_factory=_customer)
    owner: Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,126}[!-~])?$")] | None = None
    expires_in_s: Annotated[int, Field(ge=60, le=_YEARS_S)] | None = None


class KeyOut(BaseModel):
    """A key; `last_used_at` is accurate to five minutes."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["api_key"] = "api_key"
    project_id: str
    name: str
    owner: str | None
    prefix: str
    scopes: list[Scope]
    created_at: UnixTime
    expires_at: UnixTime | None
    last_used_at: UnixTime | None
    revoked_at: UnixTime | None


class KeySecret(BaseModel):
    """A key with its secret, which is shown only once."""

    object: Literal["api_key.secret"] = "api_key.secret"
    key: KeyOut
    secret: str


class KeyList(BaseModel):
    """All keys, oldest first, without their secrets; including revoked and expired ones."""

    object: Literal["list"] = "list"
    data: list[KeyOut]
    has_more: Literal[False] = False

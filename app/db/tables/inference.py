"""Tables of inference: requests with caller, model and tokens, and the adapters that a server has loaded.

The texts of a request are stored only if a policy says so.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, text, true
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now
from app.db.session import timestamp

RUNNING, DONE = "running", "done"  # values of `InferenceCall.status`; any other value is an error code
PROCESS_LOST = "process_lost"  # the API process died while the replies were written
IS_RUNNING = text("status = 'running'")  # must match the text of the partial index


class InferenceCall(Base):
    """One inference request. `reserved_tokens` is the possible length of its replies and counts against the quota.

    `owner` is the API process that answers and extends the lease. If that process dies, `app.inference.call_leases`
    completes the row with the tokens that were sent.
    """

    __tablename__ = "inference_calls"
    __table_args__ = (
        Index("ix_inference_calls_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_inference_calls_running", "created_at", sqlite_where=IS_RUNNING, postgresql_where=IS_RUNNING),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("call_"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    endpoint: Mapped[str]
    model: Mapped[str]
    archive_sha256: Mapped[str | None]  # of the released archive; null: a base model
    is_attested: Mapped[bool] = mapped_column(default=True, server_default=true())  # the engine proved its weights
    status: Mapped[str] = mapped_column(default=RUNNING)
    prompt_tokens: Mapped[int] = mapped_column(default=0)
    reply_tokens: Mapped[int] = mapped_column(default=0)
    reserved_tokens: Mapped[int] = mapped_column(default=0, server_default="0")  # 0 after the end
    owner: Mapped[str | None]  # the API process; null in rows of older versions
    lease_expires_at: Mapped[float | None]  # Unix seconds by the database's clock; null after the end
    first_token_s: Mapped[float | None]  # seconds since the request arrived
    seconds: Mapped[float | None]


class StoredReply(Base):
    """The texts of a request, stored under its id until they expire or their job or project is erased."""

    __tablename__ = "stored_replies"
    __table_args__ = (Index("ix_stored_replies_tenant_id_created_at", "tenant_id", "created_at"),)

    id: Mapped[str] = mapped_column(ForeignKey("inference_calls.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)
    model: Mapped[str]
    job_id: Mapped[str | None] = mapped_column(index=True)  # the job that made the model; null: a base model
    prompt: Mapped[Any] = mapped_column(JSON)  # messages, or a text
    replies: Mapped[Any] = mapped_column(JSON)  # texts as they were sent


class ServedAdapter(Base):
    """One adapter at one server; the row exists before its files do, until the server has unloaded it."""

    __tablename__ = "served_adapters"

    server: Mapped[str] = mapped_column(primary_key=True)  # SPARD_SERVING_URL of the process that loaded it
    sha256: Mapped[str] = mapped_column(primary_key=True)  # of its archive
    project_id: Mapped[str] = mapped_column("tenant_id")
    job_id: Mapped[str] = mapped_column(index=True)
    model: Mapped[str]  # the name of the last request for it
    base: Mapped[str]
    loaded_at: Mapped[datetime] = mapped_column(default=timestamp())
    condemned_at: Mapped[datetime | None]  # since when it must not answer

"""What was asked of models: who asked which, and how many tokens it took; texts only where a policy has them kept."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, text, true
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now

RUNNING, DONE = "running", "done"  # of `InferenceCall.status`; anything else is the code of an error
PROCESS_LOST = "process_lost"  # the API process died while the replies were written
IS_RUNNING = text("status = 'running'")  # in these words the partial index serves it


class InferenceCall(Base):
    """One request. While it runs, `reserved_tokens` is what its replies may come to, and counts against the quota.

    `owner` is the API process that answers, and extends the lease. When that process is gone,
    `app.inference.lost_calls` completes the row with the tokens that were sent.
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
    archive_sha256: Mapped[str | None]  # of what was released; null: a base model
    is_attested: Mapped[bool] = mapped_column(default=True, server_default=true())  # the engine proved what it holds
    status: Mapped[str] = mapped_column(default=RUNNING)
    prompt_tokens: Mapped[int] = mapped_column(default=0)
    reply_tokens: Mapped[int] = mapped_column(default=0)
    reserved_tokens: Mapped[int] = mapped_column(default=0, server_default="0")  # 0 once it has ended
    owner: Mapped[str | None]  # the API process; null in rows from before there was one
    lease_expires_at: Mapped[float | None]  # Unix seconds by the database's clock; null once it has ended
    first_token_s: Mapped[float | None]  # since the request came
    seconds: Mapped[float | None]


class StoredReply(Base):
    """The texts of a request, under its id, until they expire, their job is erased or their project's are."""

    __tablename__ = "stored_replies"
    __table_args__ = (Index("ix_stored_replies_tenant_id_created_at", "tenant_id", "created_at"),)

    id: Mapped[str] = mapped_column(ForeignKey("inference_calls.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)
    model: Mapped[str]
    job_id: Mapped[str | None] = mapped_column(index=True)  # that made the model; null: a base model
    prompt: Mapped[Any] = mapped_column(JSON)  # messages, or a text
    replies: Mapped[Any] = mapped_column(JSON)  # texts as they were shown

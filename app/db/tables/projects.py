"""Tables of projects with their quotas, API keys, browser sessions and webhooks, and of the audit log.

A trigger prevents changing or deleting rows of the audit log.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


class Project(Base):
    """The owner of files, jobs and models; the table and the columns that refer to it keep the name `tenant`."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("org-"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    used_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")  # faded GPU seconds
    used_at: Mapped[float] = mapped_column(default=0.0, server_default="0")  # when it was updated; database's clock


class ApiKey(Base):
    """An API key; its secret is shown once and stored as SHA-256, because 256 random bits need no slow hash."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("key_"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    name: Mapped[str]
    owner: Mapped[str | None]  # the person who holds it
    prefix: Mapped[str] = mapped_column(index=True)
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]  # accurate to five minutes


class Quota(Base):
    """A project's limits; null means unlimited, except for requests, where the deployment's limit applies."""

    __tablename__ = "quotas"

    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"), primary_key=True)
    max_file_bytes: Mapped[int | None] = mapped_column(BigInteger)  # over all its training files
    max_file_rows: Mapped[int | None] = mapped_column(BigInteger)  # likewise
    max_jobs_per_day: Mapped[int | None]
    max_unfinished_jobs: Mapped[int | None]
    max_gpu_seconds: Mapped[float | None]  # of jobs created in the last 30 days
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]  # prompts and replies together
    max_tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)  # likewise, in any 24 hours
    weight: Mapped[float | None]  # scheduling weight; None: 1


class BrowserSession(Base):
    """A browser that was signed in with a key; only the SHA-256 of its cookie is stored."""

    __tablename__ = "browser_sessions"

    digest: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)


class WebhookEndpoint(Base):
    """An address that receives events about ended jobs; its secret is stored because it signs each delivery."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("whe_"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"), index=True)
    url: Mapped[str]
    events: Mapped[list[str]]
    secret: Mapped[str]
    old_secret: Mapped[str | None]  # also signs, until `old_secret_until`
    old_secret_until: Mapped[datetime | None]
    status: Mapped[str] = mapped_column(default="enabled")  # enabled | disabled
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class WebhookDelivery(Base):
    """One event for one endpoint, written in the transaction of the change that it reports."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("endpoint_id", "event_id"),
        Index("ix_webhook_deliveries_status_due_at", "status", "due_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("whd_"))
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id"))
    event_id: Mapped[str]  # equal for all endpoints and attempts, so that receivers recognize repeats
    type: Mapped[str]
    job_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    status: Mapped[str] = mapped_column(default="pending")  # pending | delivered | failed
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[float] = mapped_column(default=0.0)  # Unix seconds by the database's clock
    outcome: Mapped[str | None]  # of the last attempt
    delivered_at: Mapped[datetime | None]


class AuditEntry(Base):
    """One action. `hash` is SHA-256 over the previous row's hash and this row's other columns."""

    __tablename__ = "audit_log"

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    actor: Mapped[str]  # a key's id, or `system`
    tenant_id: Mapped[str | None]
    action: Mapped[str]  # what.done: file.uploaded, job.created, admin.denied, ...
    target: Mapped[str]  # the id of the affected thing
    result: Mapped[str]  # ok | denied
    request_id: Mapped[str | None]
    details: Mapped[dict[str, object] | None]
    hash: Mapped[str]

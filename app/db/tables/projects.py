"""Tables of projects, their quotas, API keys and browser sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey
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

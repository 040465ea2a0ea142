"""Tables of webhook endpoints and of deliveries to them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


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

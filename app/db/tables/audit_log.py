"""Table of the audit log; a trigger prevents changing or deleting its rows."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base


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

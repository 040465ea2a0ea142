"""Table of adapters that are unpacked for, and loaded by, an inference server that is not ours."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base
from app.db.session import timestamp


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
